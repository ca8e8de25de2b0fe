"""TensorFlow's names for this package's functions and classes.

They are public as `daskdist.data`, `daskdist.distribute`, `daskdist.tpu` and `daskdist.experimental`.
"""
