"""Conversion of arrays and datasets to those of other frameworks.

Each framework has a module here and an extra of its name. A framework is imported only when a function of its module
is called.
"""
