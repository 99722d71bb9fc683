"""The examples of the documentation print what their comments say.

A document's python blocks run as one script. What it prints must be, line by line, what stands in comments: at the end
of a ``print`` line, or alone on the lines after it. A hub id is replaced by a checkpoint of that shape with random
weights and the real tokenizer, so nothing here depends on what a model has learned.

A block fenced as ``py`` is a file that a reader writes in a package of their own, and is not run; the sample plugin in
``tests/plugins`` is one.
"""

import re
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *ROOT.glob("nnterp-*/README.md"), *ROOT.glob("nnterp-*/docs/*.md")]
    if "\n```python" in path.read_text()
)


@pytest.fixture(scope="session")
def gpt2_directory(tmp_path_factory):
    """GPT-2's own config and tokenizer, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from nnterp.checkpoints import gpt2_tokenizer

    directory = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config()).save_pretrained(directory)
    gpt2_tokenizer().save_pretrained(directory)
    return directory


#: Hub ids that documents load beside GPT-2: the config of a small checkpoint of the same type, whose sizes no document
#: prints.
STAND_INS = {
    "AntonV/mamba2-130m-hf": {
        "model_type": "mamba2",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 4,
    },
    "state-spaces/mamba-130m-hf": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 3},
    "allenai/Olmo-Hybrid-7B": {
        "model_type": "olmo_hybrid",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    },
}


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory):
    """A function from a script to the script that loads the stand-ins of the hub ids it names."""
    from nnterp.testing import checkpoint

    directories = {}

    def replaced(script: str) -> str:
        for repo, fields in STAND_INS.items():
            if repo in script and repo not in directories:
                directory = tmp_path_factory.mktemp(fields["model_type"])
                directories[repo] = checkpoint.save(checkpoint.config(**fields), directory)
            script = script.replace(repo, str(directories.get(repo, repo)))
        return script

    return replaced


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def expected(script: str) -> list[str]:
    """The lines a script says it prints: a comment behind a ``print``, or comment lines after a statement that
    prints.
    """
    found, printing = [], False
    for line in script.splitlines():
        stripped = line.strip()
        if stripped.startswith("print("):
            comment = stripped.rpartition("  # ")
            printing = not comment[0]
            if comment[0]:
                found.append(comment[2])
        elif stripped.startswith("# ") and printing:
            found.append(stripped[2:])
        elif stripped:
            printing = False
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_examples_print_what_they_say(document, gpt2_directory, stand_ins, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = "\n".join(blocks((ROOT / document).read_text()))
    script = stand_ins(script.replace("openai-community/gpt2", str(gpt2_directory)))
    file = tmp_path / "example.py"
    file.write_text(script)
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        exec(compile(script, str(file), "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.splitlines() == expected(script)
