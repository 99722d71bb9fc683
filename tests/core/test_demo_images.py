"""The demo on a multimodal checkpoint: what a photograph is to it, cell by cell."""

import io

import pytest
import torch

from nnterp import StandardizedTransformer, Unavailable, checkpoints, demo, families
from nnterp.demo import pictures, prepared, script, toy_llava
from nnterp.demo.figures import figures
from nnterp.demo.seeing import seeing
from nnterp.demo.terminal import Terminal
from nnterp.demo.wording import conclusion


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """The toy after two steps of training, saved as it is when it is trained."""
    directory, lines = tmp_path_factory.mktemp("toy"), []
    model, processor = toy_llava.train(lines.append, steps=2)
    assert "training" in lines[0]
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def test_the_square_is_where_the_picture_says():
    shown = pictures.held_out()
    pixels = torch.tensor(list(shown.image.tobytes())).reshape(pictures.SIDE, pictures.SIDE, 3)
    left, top, right, bottom = shown.box
    inside = pixels[top:bottom, left:right].reshape(-1, 3)
    assert (inside == torch.tensor(pictures.COLOURS[shown.answer])).all()
    assert (right - left) * pictures.CELLS == pictures.SIDE


def test_each_cell_is_a_run(untrained):
    """The effect of a cell is that of its patches taken out by a torch hook on the bare tower."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = prepared.load(str(untrained), print, dispatch=True, attn_implementation="eager", device="cpu")
    found = seeing(model, iter)
    assert found.effect.shape == (8, 8)

    bare = AutoModelForImageTextToText.from_pretrained(untrained, attn_implementation="eager").eval()
    shown = pictures.held_out()
    text = f"<image>{pictures.QUESTION}"
    inputs = AutoProcessor.from_pretrained(untrained)(text=text, images=[shown.image], return_tensors="pt")
    with torch.no_grad():
        clean = bare(**inputs).logits[0, -1].log_softmax(-1)
    answer = clean.argmax()
    assert model.tokenizer.decode([answer]) == found.answer
    for row, column in [(0, 0), (6, 1), (3, 7)]:
        position = 1 + 8 * row + column  # behind the class token

        def taken_out(module, args, output, position=position):
            edited = output.clone()
            edited[:, position] = output[0].mean(0)
            return edited

        block = bare.get_submodule("model.vision_tower.encoder.layers.0")
        handle = block.register_forward_hook(taken_out, prepend=True)
        with torch.no_grad():
            without = bare(**inputs).logits[0, -1].log_softmax(-1)
        handle.remove()
        assert abs((clean - without)[answer].item() - found.effect[row, column].item()) < 1e-4


def test_the_demo_shows_it(untrained, tmp_path):
    stream, html = io.StringIO(), tmp_path / "page.html"
    (examined,) = demo.run([str(untrained)], html, Terminal(stream), device="cpu")
    section = next(each for each in examined.sections if each.title.startswith("A photograph"))
    assert section.reason is None
    assert "hangs most on row" in conclusion(section.finding).replace("\n", " ")
    (figure,) = figures(section.finding)
    assert figure.layout.images[0].source.startswith("data:image/png;base64,")
    assert figure.layout.images[0].source in html.read_text().replace("\\u002f", "/")


def test_a_load_that_no_image_reaches(untrained):
    model = StandardizedTransformer(str(untrained), dispatch=True, device="cpu")
    with pytest.raises(Unavailable, match="no image"):
        seeing(model, iter)


def test_a_checkpoint_whose_image_side_is_not_served_says_which_package_has_it(untrained, monkeypatch):
    monkeypatch.setattr(families, "wrapper", lambda model_type: None)
    monkeypatch.setattr(families, "plugins", list)
    monkeypatch.setattr(demo, "EXPERIMENTS", {})
    stream = io.StringIO()
    (examined,) = demo.run([str(untrained)], None, Terminal(stream), device="cpu")
    (section,) = examined.sections
    assert section.finding is None and "pip install 'nnterp[vision]'" in section.reason
    assert f"Not on this checkpoint: {section.reason[:20]}" in stream.getvalue()


def test_a_photograph_that_cannot_be_fetched(untrained, monkeypatch):
    model = prepared.load(str(untrained), print, dispatch=True, attn_implementation="eager", device="cpu")

    def offline():
        raise checkpoints.FetchError("no index")

    monkeypatch.setattr(checkpoints, "photographs", offline)
    with pytest.raises(Unavailable, match="no photograph: no index"):
        seeing(model, iter)


def test_support_lists_the_towers_blocks_with_their_axes(untrained):
    model = prepared.load(str(untrained), print, attn_implementation="eager")
    rows = {row.value: row for row in script.support(model).rows}
    output, probabilities = rows["vision.layer_output"], rows["vision.self_attn.attention_probabilities"]
    assert (output.blocks, output.of, output.axes) == (2, 2, "images patches vision_hidden_size")
    assert probabilities.blocks == 2 and probabilities.axes.endswith("query key")
    assert rows["vision.image_features"].blocks is None and rows["layer_output"].of == 3


@pytest.mark.slow
def test_the_trained_toy_says_where_the_square_is(tmp_path, monkeypatch):
    monkeypatch.setenv("NNTERP_CACHE", str(tmp_path))
    model = prepared.load("toy-llava", print, dispatch=True, attn_implementation="eager", device="cpu")
    found, shown = seeing(model, iter), pictures.held_out()
    assert found.answer.strip() == shown.answer
    assert divmod(int(found.effect.argmax()), 8) == shown.cell
    assert found.effect.max() > 1.0
    others = found.effect.flatten().sort().values[:-1]
    assert others.max() < 0.2 * found.effect.max()
    for colour, corner, cell in zip(pictures.COLOURS, (0, 60, 120, 171), [(0, 0), (3, 7), (7, 2), (4, 4)], strict=True):
        other = pictures.picture(pictures.photographs()[1], (pictures.HELD_OUT, corner), colour, cell)
        monkeypatch.setattr(pictures, "held_out", lambda other=other: other)
        found = seeing(model, iter)
        assert found.answer.strip() == colour
        assert divmod(int(found.effect.argmax()), 8) == cell and found.effect.max() > 1.0
