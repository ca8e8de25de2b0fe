"""The operations of a dataset, one file each, named like the method."""
