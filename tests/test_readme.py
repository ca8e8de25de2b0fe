"""Tests that what the README and the guides show runs."""

import functools
import re
from pathlib import Path

import pytest

import daskdist

README = Path(__file__).parent.parent / "README.md"
GUIDES = sorted(Path(daskdist.__file__).with_name("guides").glob("*.md"))
# Names with these prefixes are Dask settings and not attributes.
SETTINGS = ("daskdist.split-", "daskdist.window-", "daskdist.max-", "daskdist.step-", "daskdist.timeouts")
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
COMMANDS = dict(re.findall(r"<!-- (\w+) -->\n```bash\n(.*?)\n```", README.read_text()))


def test_python_blocks_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    # In order, as a reader would run them.
    shared = {"__name__": "__main__"}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), shared)
    shown = capsys.readouterr().out
    assert "[ 1.  -2.   0.5  3. ]" in shown
    assert "[250, 250] 124750" in shown
    assert "the weights that were saved in step 1: [ 1.  -2.   0.5  3. ]" in shown
    assert "the sum of two epochs: 9900" in shown
    assert "['key', 'distance', 'late'] 4000" in shown
    assert "right for 9" in shown
    assert re.search(r"1 +3999 +0\.\d", shown)
    assert "accuracy 1.000 of 3,500 rows" in shown
    assert "train: nothing was sent to a cluster" in shown
    assert "[[110, 111, 116], [116, 111, 0], [98, 101, 0]]" in shown
    assert "# vectorised: multiply, add" in shown
    assert "part-00002.parquet" in shown
    assert "100 batches, 100,000 different rows" in shown
    assert "shared #0" in shown
    assert "{'x': array([[500. , 250. ]," in shown


def test_the_readme_has_examples() -> None:
    assert len(BLOCKS) == 17


def test_the_two_commands_set_themselves_up() -> None:
    assert set(COMMANDS) == {"demo", "test"}
    for command in COMMANDS.values():
        assert command.startswith("python3 -m venv .venv && .venv/bin/python -m pip install")


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_blocks_of_guides_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    shared = {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        exec(compile(block, path.name, "exec"), shared)


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_guides_name_what_exists(path: Path) -> None:
    objects = {"daskdist": daskdist, "ds": daskdist.Dataset, "strategy": daskdist.MultiWorkerMirroredStrategy}
    text = path.read_text()
    names = re.findall(r"(?<![\w.`/])(?:`)?((?:daskdist|ds|strategy)(?:\.[\w-]+)+)", text)
    assert names
    for name in names:
        if not name.startswith((*SETTINGS, "daskdist.preload")):
            first, *rest = name.split(".")
            functools.reduce(getattr, rest, objects[first])


def test_the_readme_links_the_guides() -> None:
    assert [path for path in GUIDES if f"daskdist/guides/{path.name}" not in README.read_text()] == []
    assert len(GUIDES) == 5
