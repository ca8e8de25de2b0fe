"""TFRecord files and the ``tf.train.Example`` records in them."""
