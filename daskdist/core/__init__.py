"""The parts that everything else is made of: structures, specs, blocks, selections, nodes, primitives."""
