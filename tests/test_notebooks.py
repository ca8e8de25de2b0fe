"""Every notebook runs from top to bottom, and is kept with its outputs."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import nbformat
import nbformat.v4
import pytest
from jupyter_client import KernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


# The extras that a notebook needs besides those of the tests.
NEEDS = {"04-training": ("jax", "torch")}

# The only logs that a notebook is meant to show.
LOGS = {
    "03-a-cluster": r"lost tcp://\S+, and with it replica 0; 2 of 3 replicas are left\nmaking \d+ calls? again.*\n"
    r"tcp://\S+ takes part; there are 3 replicas now\n"
}


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def text_of(notebook: nbformat.NotebookNode) -> str:
    actual = outputs(notebook)
    return "\n".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in actual)


def test_the_folder_has_notebooks():
    assert NOTEBOOKS


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """Start one kernel for all notebooks, since imports and starting workers take longer than most notebooks."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(
        cwd=str(tmp_path_factory.mktemp("kernel")),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver",
        },
    )
    yield manager
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_notebook_runs_without_errors(path, tmp_path, kernel):
    for name in NEEDS.get(path.stem, ()):
        pytest.importorskip(name, reason=f"{name} is not installed")
    copy = Path(shutil.copy(path, tmp_path))
    notebook = nbformat.read(copy, as_version=4)
    # Forget the names of other notebooks. Starting processes needs `__spec__`.
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\n__spec__ = None\n%cd -q {tmp_path}"))
    # A cell that raises ends it with an error.
    client = NotebookClient(notebook, timeout=90, km=kernel)
    try:
        client.execute()
    finally:
        client.kc.stop_channels()
    assert all(cell.execution_count for cell in code_cells(notebook))
    del notebook.cells[0]
    kept = nbformat.read(path, as_version=4)
    assert [len(cell.outputs) > 0 for cell in code_cells(notebook)] == [
        len(cell.outputs) > 0 for cell in code_cells(kept)
    ]
    assert [value.name for value in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_notebook_is_stored_with_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    actual = outputs(notebook)
    assert any("image/png" in output.get("data", {}) for output in actual)
    assert not any(output.output_type == "error" for output in actual)
    # A notebook has no logs other than those that it is meant to show.
    logs = "".join(output.text for output in actual if output.get("name") == "stderr")
    assert re.fullmatch(LOGS.get(path.stem, ""), logs)
    # A notebook shows no path of the machine on which it was run.
    assert not re.search(r"(?<![\w:/.])/\w+/", text_of(notebook))


def test_training_shows_what_it_promises():
    shown = text_of(nbformat.read(ROOT / "notebooks" / "04-training.ipynb", as_version=4))
    actual = dict(re.findall(r"(PyTorch|JAX): ([\d.]+)% of \d+ held-out digits", shown))
    assert set(actual) == {"PyTorch", "JAX"}
    assert all(float(share) >= 94 for share in actual.values())


def test_a_pass_continues_after_a_worker_is_killed():
    shown = text_of(nbformat.read(ROOT / "notebooks" / "03-a-cluster.ipynb", as_version=4))
    assert "95 steps, 5,690 rows, 5,690 of them different; the dataset has 5,690" in shown
    assert "5,690 rows, 5,690 of them different\n" in shown


def test_slow_passes_become_faster():
    shown = text_of(nbformat.read(ROOT / "notebooks" / "05-why-is-it-slow.ipynb", as_version=4))
    seconds = [float(actual) for actual in re.findall(r"^71 steps in ([\d.]+) s", shown, re.MULTILINE)]
    assert len(seconds) == 3
    assert seconds[0] > seconds[1] > seconds[2]
    assert "4 gzip files of 4" in shown
    assert "71 batches, 71,880 rows" in shown


def test_first_batches_shows_what_it_promises():
    shown = text_of(nbformat.read(ROOT / "notebooks" / "01-first-batches.ipynb", as_version=4))
    assert "PerReplica:{" in shown
    assert "sharding: FILE (8 files for 2 workers)" in shown
    accuracy = re.search(r"([\d.]+)% of 360 held-out digits", shown)
    assert accuracy is not None
    assert float(accuracy[1]) >= 95
