"""The basic types of the package: structures, specs, blocks, selections, nodes, primitives."""
