"""Fingerprints of pipelines, by which caches, snapshots and positions recognise theirs."""

from __future__ import annotations

from dask.base import normalize_token, tokenize

from daskdist.core.functions.user_function import code_of
from daskdist.core.node import Node, Source, walk, with_each_input
from daskdist.passes.numbering import at_pass
from daskdist.passes.seed import with_seed
from daskdist.url_secrets import without_signatures


def fingerprint(node: Node) -> str:
    """Return a token that equal pipelines share in every process, and that changes with the files they read.

    Drawn seeds and the number of the first pass are not part of it, nor are the secrets of URLs: another signature
    names the same file.
    """
    states = [source.state() for source in walk(node) if isinstance(source, Source)]
    seeded = at_pass(with_seed(node, 0), 0)
    if any(map(_has_urls, walk(node))):
        content = normalize_token([seeded, states])
        unsigned = without_signatures(content)
        if unsigned != content:
            return str(tokenize(unsigned))
    return str(tokenize(seeded, states))


def _has_urls(node: Node) -> bool:
    for value in vars(node).values():
        if any(isinstance(text, str) and "://" in text for text in (value if isinstance(value, tuple) else (value,))):
            return True
    return False


def with_new_fingerprints(node: Node) -> Node:
    """Return the pipeline with fingerprints recomputed from the current code of its functions."""
    node = with_each_input(node, with_new_fingerprints)
    if node.code is None or node.code == code_of(node.inputs[0]):
        return node
    return node.of_code(code_of(node.inputs[0]), fingerprint(node.inputs[0]))
