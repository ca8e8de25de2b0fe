"""TensorFlow's spellings, shown by its module names.

They are `daskdist.data`, `daskdist.distribute`, `daskdist.tpu` and `daskdist.experimental`.
"""
