"""Everything the README shows runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
COMMANDS = dict(re.findall(r"<!-- (\w+) -->\n```bash\n(.*?)\n```", README.read_text()))


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    assert "[ 1.  -2.   0.5  3. ]" in capsys.readouterr().out


def test_there_is_an_example() -> None:
    assert len(BLOCKS) == 1


def test_the_two_commands_set_themselves_up() -> None:
    assert set(COMMANDS) == {"demo", "test"}
    for command in COMMANDS.values():
        assert command.startswith("python3 -m venv .venv && .venv/bin/python -m pip install")
