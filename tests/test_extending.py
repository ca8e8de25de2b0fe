"""The page on the layout of the package: to add something, it is enough to change the files that the page lists."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import daskdist

PACKAGE = Path(daskdist.__file__).parent

# File -> its content if it is new, else pairs of a line and the text to insert after it.
OPERATION = {
    "daskdist/ops/every.py": """
from dataclasses import dataclass

from daskdist.core import cardinality
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, ByCursor
from daskdist.ops.shard import ShardCursor


@dataclass(frozen=True, eq=False)
class Every(Transformation):
    step: int

    name = "every"
    facts = Facts(keeps_spec=True)

    @property
    def cardinality(self):
        return cardinality.divide(self.source.cardinality, self.step, drop_remainder=False)

    def lower(self, inputs):
        rows = ByCursor(ShardCursor, (self.step, 0))
        return Arrange(inputs, rows, inputs[0].grouped, name=self.name)
""",
    "daskdist/dataset.py": [
        ("from daskdist.ops.enumerate import Enumerate\n", "from daskdist.ops.every import Every\n"),
        (
            "    # --- batches ---\n",
            "    def every(self, step, name=None):\n        return self._with(Every(self._node, step, label=name))\n\n",
        ),
    ],
}
FORMAT = {
    "daskdist/formats/digits.py": """
from dataclasses import dataclass, field

import numpy as np

from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE
from daskdist.storage.filesystem import Storage


@dataclass(frozen=True)
class Digits:
    storage: Storage = field(default_factory=Storage)

    name = "digits"
    suffixes = (".digits",)
    is_splittable = False

    def guess(self, path, head):
        return path.endswith(".digits")

    def spec(self, path):
        return ElementSpec(LONE, (TensorSpec((), np.dtype(np.int64)),))

    def list_splits(self, path, file, first):
        version = self.storage.version(path)
        return [Split(path, path, version.num_bytes, version.num_bytes * 8, file, path)]

    def read(self, split):
        digits = np.frombuffer(self.storage.read(split.payload), np.uint8)
        return Block(LONE, (digits.astype(np.int64) - ord("0"),), split.label)
""",
    "daskdist/formats/__init__.py": [("FORMATS: Final = {\n", '    "digits": "daskdist.formats.digits:Digits",\n')],
    "daskdist/readers/digits.py": """
from daskdist.formats.digits import Digits
from daskdist.readers.files import read_files


def read_digits(paths):
    return read_files(paths, Digits())
""",
    "daskdist/__init__.py": [("_NAMES: Final = {\n", '    "read_digits": "daskdist.readers.digits:read_digits",\n')],
}
POLICY = {
    "daskdist/sharding/many_files.py": """
from daskdist.sharding import AutoShardPolicy, data, file


def decide(sharding_input):
    num_files = sum(source.num_files or 0 for source in sharding_input.sources)
    chosen = file if num_files >= 4 * sharding_input.num_pipelines else data
    return chosen.decide(sharding_input)
""",
    "daskdist/sharding/__init__.py": [
        ("    HINT = 3\n", "    MANY_FILES = 4\n"),
        ("POLICIES: Final = {\n", '    AutoShardPolicy.MANY_FILES: "daskdist.sharding.many_files",\n'),
    ],
}
DEVICE = {
    "daskdist/devices/slot.py": """
from dataclasses import dataclass
from typing import ClassVar

from daskdist.devices.cpu import CpuDevice


@dataclass(frozen=True)
class SlotDevice(CpuDevice):
    kind: ClassVar[str] = "SLOT"
""",
    "daskdist/devices/__init__.py": [
        ("KINDS: Final = {\n", '    "SLOT": ("daskdist.devices.slot:SlotDevice", "numpy"),\n')
    ],
}
REDUCTION = {
    "daskdist/strategy/reduce/reductions.py": [
        ('    PROD = "PROD"\n', '    NORM = "NORM"\n'),
        (
            "NAMED: Final[dict[Any, NamedReduction]] = {\n",
            "    ReduceOp.NORM: NamedReduction(Reduction(lambda x, axis: np.sum(x * x, axis), np.add, np.sqrt)),\n",
        ),
    ],
}
PARTS = {
    "An operation": OPERATION,
    "A format": FORMAT,
    "A sharding policy": POLICY,
    "A kind of device": DEVICE,
    "A named reduction": REDUCTION,
}

PROGRAM = """
import sys

import numpy as np

import daskdist
from daskdist import AutoShardPolicy, Dataset, MirroredStrategy, Options, PerReplica

assert [int(x) for x in Dataset.range(7).every(3)] == [0, 3, 6]
assert [int(x) for x in daskdist.read_digits(sys.argv[1])] == [3, 1, 4, 1]
assert [int(x) for x in daskdist.read_files(sys.argv[1])] == [3, 1, 4, 1]
strategy = MirroredStrategy(["SLOT:0", "SLOT:1"])
dataset = daskdist.read_digits(sys.argv[1]).batch(2).with_options(Options(auto_shard_policy=AutoShardPolicy.MANY_FILES))
distributed = strategy.distribute_dataset(dataset)
assert [batch.values[1].tolist() for batch in distributed] == [[1], [1]]
norm = strategy.reduce("NORM", PerReplica([np.array([1.0, 2.0]), np.array([2.0, 4.0])]), axis=0)
assert norm == 5.0, norm
print("done")
"""


def files_listed(part):
    """Return the files that the page lists for a part, with NAME in them."""
    page = (PACKAGE / "README.md").read_text()
    (section,) = re.findall(rf"^### {part}\n(.*?)(?=^### |\Z)", page, re.MULTILINE | re.DOTALL)
    return re.findall(r"^- `([\w/.]+)`", section, re.MULTILINE)


@pytest.mark.parametrize("part", PARTS)
def test_the_page_lists_what_is_touched(part):
    patterns = [re.escape(path).replace("NAME", "[a-z][a-z_]*") for path in files_listed(part)]
    touched = list(PARTS[part])
    assert len(patterns) == len(touched)
    for pattern in patterns:
        assert len([path for path in touched if re.fullmatch(pattern, path)]) == 1, pattern


def test_the_package_is_extended(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "daskdist", ignore=shutil.ignore_patterns("__pycache__"))
    for edits in PARTS.values():
        for name, edit in edits.items():
            path = tmp_path / name
            if isinstance(edit, str):
                assert not path.exists()
                path.write_text(f'"""Added by a test."""\n{edit}')
                continue
            text = path.read_text()
            for line, addition in edit:
                assert text.count(line) == 1, (name, line)
                text = text.replace(line, line + addition)
            path.write_text(text)
    (tmp_path / "a.digits").write_text("3141")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "a.digits")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr


def test_files_on_the_page_exist():
    # Bare names of files would not be found, so all are paths below the package or the project.
    page = (PACKAGE / "README.md").read_text()
    named = {name for name in re.findall(r"`([\w/]+(?:\.py|/))`", page) if "NAME" not in name}
    assert len(named) > 80
    assert sorted(name for name in named if not any((root / name).exists() for root in (PACKAGE, PACKAGE.parent))) == []


def test_functions_and_classes_on_the_page_are_in_the_file_before_them():
    page = (PACKAGE / "README.md").read_text()
    named = re.findall(r"`([\w/]+\.py)` \(`(\w+)`", page)
    assert len(named) >= 4
    assert [
        pair for pair in named if not re.search(rf"^ *(def|class) {pair[1]}\b", (PACKAGE / pair[0]).read_text(), re.M)
    ] == []
