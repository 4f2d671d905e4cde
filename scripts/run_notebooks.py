"""Run notebooks in place and keep their outputs, without what differs from run to run.

python scripts/run_notebooks.py notebooks/*.ipynb
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}

for path in map(Path, sys.argv[1:]):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=120,
        record_timing=False,  # times would make a diff of every run
        kernel_name=KERNEL["name"],
        resources={"metadata": {"path": str(path.parent)}},
        coalesce_streams=True,
    )
    client.execute()
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
    nbformat.write(notebook, path)
    print(f"{path}: {path.stat().st_size} bytes")
