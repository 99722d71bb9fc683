"""`nnterp demo` end to end on small random checkpoints, its findings against the bare module, and the command line."""

import io
import re
from html.parser import HTMLParser

import pytest
import torch

from nnterp import StandardizedTransformer, Unavailable, cli, demo
from nnterp.demo import prompts, script, toy
from nnterp.demo.page import page
from nnterp.demo.terminal import Terminal, bar, merged, shade


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self):
        return True


class Loads(HTMLParser):
    """Collects whatever a page would load from elsewhere, and its text."""

    def __init__(self):
        super().__init__()
        self.loads, self.words, self.plots = [], [], 0

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.plots += "plotly-graph-div" in (attrs.get("class") or "")
        for name in ("src", "href", "srcset", "data", "poster", "action"):
            target = attrs.get(name) or ""
            if target and not target.startswith(("#", "data:")):
                self.loads.append((tag, target))

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(autouse=True, scope="module")
def hundred_columns():
    """Paragraphs break where these tests expect them to, whatever terminal runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        yield


def run_quietly(names, html, **kwargs):
    stream = io.StringIO()
    examined = demo.run(names, html, Terminal(stream), device="cpu", **kwargs)
    return examined, stream.getvalue()


@pytest.fixture(scope="module")
def ran(small_checkpoint, tmp_path_factory):
    """One run of the whole demo: what was found, what was printed, and the page."""
    html = tmp_path_factory.mktemp("page") / "demo.html"
    examined, printed = run_quietly([str(small_checkpoint)], html)
    return examined[0], printed, html.read_text(encoding="utf-8")


def finding(ran, kind):
    return next(section.finding for section in ran[0].sections if isinstance(section.finding, kind))


def test_every_experiment_runs_and_is_printed(ran):
    examined, printed, _ = ran
    assert [section.reason for section in examined.sections] == [None] * len(demo.EXPERIMENTS)
    for title in demo.EXPERIMENTS:
        assert title in printed
    assert "\033" not in printed and "\r" not in printed
    assert max(len(line) for line in printed.splitlines()) <= 100
    assert examined.facts["blocks"] == "4" and examined.facts["width"] == "32"


def test_the_page_loads_nothing_and_shows_everything(ran):
    examined, _, html = ran
    parsed = Loads()
    parsed.feed(html)
    assert parsed.loads == []
    assert not re.search(r"@import|url\(\s*['\"]?https?:", html[: html.index("<script")])
    text = " ".join(parsed.words)
    for title in demo.EXPERIMENTS:
        assert title in text
    assert parsed.plots == 7 + (finding(ran, script.Patching).heads is not None)
    assert "def logit_lens(" in text and "def steering(" in text


def test_the_page_escapes_what_a_model_says(ran):
    found = script.Steering(1, [("<b>", {0.0: "<script>"})], "<i>", [-1.0, 0.0, 1.0], [0.1, 0.5, 0.9])
    section = demo.Section("<u>", script.steering, found)
    html = page([demo.Examined("<a href='x'>", "", {}, [section])])
    parsed = Loads()
    parsed.feed(html)
    assert parsed.loads == []
    assert "<b>&lt;" not in html and "&lt;script&gt;" in html


def test_one_script_runs_on_several_checkpoints(small_checkpoint, tmp_path):
    html = tmp_path / "both.html"
    examined, printed = run_quietly([str(small_checkpoint)] * 2, html)
    assert len(examined) == 2
    assert printed.count("Steering: a direction for mood") == 2
    assert html.read_text(encoding="utf-8").count("<h2 ") == 2


def test_no_page_is_written_when_none_is_asked_for(small_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "EXPERIMENTS", {"Support": script.support})
    run_quietly([str(small_checkpoint)], None)
    assert list(tmp_path.iterdir()) == []


# -- the findings against the bare module -----------------------------------------------------------------------------


@torch.no_grad()
def bare(model, text, **kwargs):
    return model._module(**model.tokenizer(text, return_tensors="pt"), **kwargs)


def test_support_lists_what_the_model_says(ran, small_model):
    rows = {row.value: row for row in finding(ran, script.Support).rows}
    assert list(rows) == list(small_model.support())
    assert rows["layer_output"].axes == "batch seq hidden_size" and rows["layer_output"].blocks == 4
    assert rows["self_attn.attention_probabilities"].axes == "batch num_heads query key"
    assert rows["logits"].blocks is None and rows["logits"].reason is None


def test_top_tokens_are_the_bare_models(ran, small_model):
    for prompt, tokens in finding(ran, script.TopTokens).predictions:
        probs = bare(small_model, prompt).logits[0, -1].softmax(-1)
        assert list(tokens.values()) == pytest.approx(probs.topk(5).values.tolist(), rel=1e-4)


def test_the_lens_ends_in_what_the_model_says(ran, small_model):
    lens = finding(ran, script.Lens)
    probs = bare(small_model, prompts.LENS).logits[0].softmax(-1)
    torch.testing.assert_close(lens.confidence[-1], probs.max(-1).values, rtol=1e-4, atol=1e-6)
    assert lens.best[-1] == [small_model.tokenizer.decode([token]) for token in probs.argmax(-1)]
    assert lens.answer == lens.best[-1][-1]
    assert lens.answer_rank[-1] == 1
    assert lens.answer_prob[-1] == pytest.approx(float(probs[-1].max()), rel=1e-4)


def test_the_induction_head_has_the_highest_score(ran, small_model):
    found = finding(ran, script.Induction)
    n = prompts.COPY_LENGTH
    half = prompts.random_tokens(small_model, 4, n)
    ids = torch.cat([half, half], dim=1)
    with torch.no_grad():
        output = small_model._module(ids, output_attentions=True)
    for layer, pattern in enumerate(output.attentions):
        paid = torch.stack([pattern[:, :, q, q - n + 1] for q in range(n, 2 * n)])
        torch.testing.assert_close(found.scores[layer], paid.mean((0, 1)), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.pattern, output.attentions[found.layer][0, found.head], rtol=1e-4, atol=1e-6)
    assert float(found.scores[found.layer, found.head]) == float(found.scores.max())
    logs = output.logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert found.surprise == pytest.approx([float(-logs[:, : n - 1].mean()), float(-logs[:, n:].mean())], rel=1e-4)


def test_each_patch_is_one_place_of_one_run(ran, small_model):
    found = finding(ran, script.Patching)
    streams = []

    def keep(module, args, output):
        streams.append((output if isinstance(output, torch.Tensor) else output[0]).clone())

    hooks = [block._module.register_forward_hook(keep) for block in small_model.layers]
    bare(small_model, found.source)
    for hook in hooks:
        hook.remove()
    answers = prompts.two_facts(small_model)[-1].target_tokens

    def share(logits):
        probs = logits[0, -1].softmax(-1)
        source, target = (float(probs[answers[name]].sum()) for name in ("source", "target"))
        return source / (source + target)

    assert found.target_share == pytest.approx(share(bare(small_model, found.target).logits), rel=1e-3)
    assert found.source_share == pytest.approx(share(bare(small_model, found.source).logits), rel=1e-3)
    assert found.tokens[found.subject].strip() in found.target and found.tokens[found.subject] not in found.source
    for layer, position in ((0, found.subject), (2, -1), (3, 1)):

        def put(module, args, output, layer=layer, position=position):
            (output if isinstance(output, torch.Tensor) else output[0])[0, position] = streams[layer][0, position]

        hook = small_model.layers[layer]._module.register_forward_hook(put)
        expected = share(bare(small_model, found.target).logits)
        hook.remove()
        assert float(found.share[layer, position]) == pytest.approx(expected, rel=1e-3)


def test_the_hand_off_is_where_the_answer_moves_to_the_last_token():
    def patching(share):
        return script.Patching("", "", "Berlin", "Paris", ["a", "b", "c"], 1, torch.tensor(share), 1.0, 0.0, None)

    at_subject, at_end, nowhere = [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]
    assert patching([at_subject, at_subject, at_end]).hand_off == 2
    assert patching([at_subject, nowhere, at_end]).hand_off is None
    assert patching([at_end, at_end]).hand_off is None
    assert patching([at_subject, at_end, at_subject]).hand_off is None


def test_steering_with_factor_zero_is_the_model_itself(ran, small_model):
    found = finding(ran, script.Steering)
    for prompt, written in found.continuations:
        inputs = small_model.tokenizer(prompt, return_tensors="pt")
        length = {"max_new_tokens": 20, "min_new_tokens": 20}
        ids = small_model._module.generate(**inputs, **length, do_sample=False, pad_token_id=0)
        text = small_model.tokenizer.decode(ids[0], skip_special_tokens=True)
        assert written[0.0] == text.removeprefix(prompt)
        assert written[1.0] != written[0.0] or written[-1.0] != written[0.0]
    assert all(0 <= share <= 1 for share in found.bright_share)


# -- what a checkpoint lacks -----------------------------------------------------------------------------------------


def test_an_experiment_without_its_values_says_why(small_checkpoint):
    model = StandardizedTransformer(str(small_checkpoint), dispatch=True, device="cpu", attn_implementation="sdpa")
    stream = io.StringIO()
    sections = [demo.examine(model, title, run, Terminal(stream)) for title, run in demo.EXPERIMENTS.items()]
    missing = [section for section in sections if section.finding is None]
    assert [section.title for section in missing] == ["An induction head"]
    assert "attn_implementation" in missing[0].reason
    assert "Not on this checkpoint: self_attn.attention_probabilities" in stream.getvalue()
    html = page([demo.Examined("sdpa", "", {}, sections)])
    assert "Not on this checkpoint" in html
    rows = {row.value: row for row in sections[0].finding.rows}
    assert rows["self_attn.attention_probabilities"].blocks == 0
    assert "[1]" in stream.getvalue()


def test_require_names_the_module_no_block_has():
    class Attentionless:
        num_layers = 2

        def support(self):
            return {"layer_output": None, "linear_attn.states": {0: "no states", 1: "no states"}, "logits": "gone"}

    script.require(Attentionless(), "layer_output")
    with pytest.raises(Unavailable, match="no block of this model has a self_attn module"):
        script.require(Attentionless(), "self_attn.attention_probabilities")
    with pytest.raises(Unavailable, match="linear_attn.states: no states"):
        script.require(Attentionless(), "linear_attn.states")
    with pytest.raises(Unavailable, match="logits: gone"):
        script.require(Attentionless(), "logits")


def test_a_value_that_some_blocks_have_is_enough():
    class Hybrid:
        num_layers = 2

        def support(self):
            return {"self_attn.attention_probabilities": {1: "no self_attn module"}}

    script.require(Hybrid(), "self_attn.attention_probabilities")


# -- the terminal ----------------------------------------------------------------------------------------------------


def test_colour_and_a_moving_line_only_in_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, colour, moving in ((io.StringIO(), False, False), (Screen(), True, True)):
        terminal = Terminal(stream)
        with terminal.waiting("counting") as progress:
            assert list(progress([1, 2])) == [1, 2]
        terminal.heading("A heading")
        assert ("\033[1m" in stream.getvalue()) is colour
        assert ("1/2" in stream.getvalue()) is moving
        assert "✓ counting" in stream.getvalue() and "A heading" in stream.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Screen()
    Terminal(plain).heading("A heading")
    assert "\033[1m" not in plain.getvalue()


def test_bars_shades_and_merged_rows():
    assert [bar(share, 4) for share in (0.0, 0.25, 1.0, 7.0)] == ["", "█", "████", "████"]
    assert bar(1 / 32, 4) == "▏"
    assert [shade(share) for share in (0.0, 0.05, 0.5, 1.0)] == [" ", " ", "▒", "█"]
    share = torch.tensor([[0.0, 1.0], [0.01, 0.99], [0.9, 0.0]])
    assert merged(share) == [("0–1", ["0", "100"]), ("2", ["90", "0"])]


def test_a_finding_nobody_can_show_is_a_mistake():
    with pytest.raises(TypeError, match="int"):
        Terminal(io.StringIO()).show(3)


# -- the command line -------------------------------------------------------------------------------------------------


def test_demo_command(small_checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "EXPERIMENTS", {"Support": script.support})
    html = tmp_path / "page.html"
    assert cli.main(["demo", str(small_checkpoint), "--html", str(html), "--device", "cpu"]) == 0
    assert html.exists() and str(html) in capsys.readouterr().out


def test_demo_without_plotly_says_what_to_install(monkeypatch, capsys, small_checkpoint):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo", str(small_checkpoint)]) == 1
    assert "nnterp-core[demo]" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there(capsys, tmp_path):
    assert cli.main(["demo", str(tmp_path / "nowhere"), "--no-html"]) == 1
    assert cli.main(["support", str(tmp_path)]) == 1
    assert "cannot load" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [("--device", "nowhere"), ("--dtype", "float33"), ("--dtype", "int8"), ("--dtype", "nn")]
)
def test_a_device_or_dtype_that_is_none(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", "smollm2", "--no-html", *option])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert option[0] in error and option[1] in error


def test_a_checkpoint_without_a_tokenizer(small_checkpoint, capsys, tmp_path):
    for file in small_checkpoint.iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert cli.main(["demo", str(tmp_path), "--no-html", "--device", "cpu"]) == 1
    assert "okenizer" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_support_command(small_checkpoint, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["support", str(small_checkpoint), "--attn", "sdpa"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^self_attn.attention_queries +4 of 4 ", printed, re.MULTILINE)
    assert re.search(r"^self_attn.attention_scores +0 of 4 \[1\] ", printed, re.MULTILINE)
    assert all(len(line) <= columns for line in printed.splitlines())
    assert cli.main(["support", str(small_checkpoint), "--layer", "-1"]) == 0
    assert "logits" not in capsys.readouterr().out
    assert cli.main(["support", str(small_checkpoint), "--layer", "9"]) == 1
    assert "no block 9" in capsys.readouterr().err


def test_families_command(capsys):
    assert cli.main(["families"]) == 0
    printed = capsys.readouterr().out
    assert "nnterp-families-dense" in printed and "llama" in printed


# -- the toy ---------------------------------------------------------------------------------------------------------


def test_the_toy_reads_whole_words_and_trains(tmp_path, monkeypatch):
    lines = []
    model, tokenizer = toy.train(lines.append, steps=2)
    assert model.config.model_type == "gpt2" and not model.training
    for text in [prompts.FACT.format("France"), *prompts.BRIGHT, *prompts.STEERED]:
        words = text.replace(",", " ,").split()
        assert len(tokenizer(text)["input_ids"]) == len(words), text
    assert lines and "training" in lines[0]
    monkeypatch.setenv("NNTERP_CACHE", str(tmp_path))
    monkeypatch.setattr(toy, "train", lambda report: (model, tokenizer))
    directory = toy.toy_gpt2(lines.append)
    assert directory.parent == tmp_path
    assert StandardizedTransformer(str(directory), dispatch=True, device="cpu").family.__name__.endswith("gpt2")
