"""Mllama: blocks that attend to an image among blocks that attend to tokens; the text suite with an image and without.

Without one the model passes by the cross-attention blocks, and so do the bare model's hooks: what comes to such a block
and leaves it is then looked for in its neighbours.
"""

from functools import wraps

import pytest
import torch
from nnsight.intervention.interleaver import OutOfOrderError
from torch import Tensor
from transformers import AutoModelForCausalLM, CLIPImageProcessor, LlavaProcessor
from transformers.models.mllama import modeling_mllama as modeling

from nnterp.testing import Block, BlockKinds, FamilySuite, Within, checkpoint, mistake
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.facts import ROOT_ROWS, ROOT_VALUES, SITES
from nnterp.testing.oracles import greedy

#: The cross-attention block among the four, and its neighbours.
CROSS, BEFORE, AFTER = 2, 1, 3
#: Positions of an image's features: those of two tiles.
IMAGE = 6

CONFIG = {
    "model_type": "mllama",
    "image_token_index": 300,
    "text_config": {
        "model_type": "mllama_text_model",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "cross_attention_layers": [CROSS],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "vision_config": {
        "model_type": "mllama_vision_model",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "attention_heads": 4,
        "intermediate_size": 48,
        "vision_output_dim": 96,
        "image_size": 16,
        "patch_size": 8,
        "num_global_layers": 1,
        "intermediate_layers_indices": [0, 1],
        "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2]],
    },
}


class OfTheWrapper(checkpoint.Checkpoint):
    """nnterp's copy is the multimodal model, as the bare one is."""

    def load(self, dispatch=True, **options):
        processor = LlavaProcessor(CLIPImageProcessor(), checkpoint.tokenizer(), patch_size=8, image_token="<|image|>")
        return super().load(dispatch, task="image-text-to-text", processor=processor, **options)


class OfTheText(checkpoint.Checkpoint):
    """The bare copy is the causal language model inside, which nnterp's load for text generation gives."""

    def load_bare(self, **options):
        return AutoModelForCausalLM.from_pretrained(self.directory, **{**self.options, **options}).eval()

    def without_path(self):
        built = AutoModelForCausalLM.from_config(self.config, **self.options).eval()
        built.load_state_dict(self.bare.state_dict())
        return built


class CrossAttending(Block):
    """The cross-attention block written out: what it adds is multiplied by gates and a mask."""

    def __call__(self, at, block, hidden, cross_attention_mask=None, full_text_row_masked_out_mask=None, **kwargs):
        given = {
            name: kwargs[name] for name in kwargs if name in ("cross_attention_states", "cache", "past_key_values")
        }
        attention, _ = block.cross_attn(block.input_layernorm(hidden), attention_mask=cross_attention_mask, **given)
        hidden = at("mid", hidden + at("attention", block.cross_attn_attn_gate.tanh() * attention))
        term = block.mlp(block.post_attention_layernorm(hidden))
        if full_text_row_masked_out_mask is not None:
            term = full_text_row_masked_out_mask[:, 0] * term
        return hidden + at("mlp", block.cross_attn_mlp_gate.tanh() * term)


class Mllama(BlockKinds, FamilySuite):
    __test__ = False
    FAMILY = "mllama_text_model"
    CONFIG = CONFIG
    ATTENTIONS = ("self_attn", "cross_attn")
    BLOCKS = {"self_attn": (0, 1, 3), "cross_attn": (CROSS,)}
    BLOCK = CrossAttending()
    #: What of the cross-attention block lies between its modules' calls.
    WITHIN = {"cross_attn.attention_output": "attention", "layer_mid": "mid", "mlp.mlp_output": "mlp"}

    def where(self, value):
        return (
            Within(self.WITHIN[value])
            if value in self.WITHIN and self.block_of(value) == CROSS
            else super().where(value)
        )

    def site(self, value, layer, bare):
        if layer == CROSS and value in self.WITHIN:
            return self.module(f"layers.{layer}", bare), Within(self.WITHIN[value])
        if value in self.WITHIN:
            site = SITES[value]
            return self.module(f"layers.{layer}.{site.module}", bare), site
        return super().site(value, layer, bare)

    def mid_through_attention(self, edit):
        entering = self.recorded("layer_input")["layer_input", self.EDITED]
        mid = edit(self.recorded("layer_mid")["layer_mid", self.EDITED])
        return {("self_attn.attention_output", self.EDITED): lambda _: mid - entering}

    def kind(self, host, layer):
        classes = {"cross_attn": "CrossAttention"} if host else {"": "CrossAttentionLayer"}
        own = getattr(self.family, classes.get(host, ""), None) if layer == CROSS else None
        return own or super().kind(host, layer)

    def test_support_lists_every_value(self):
        """The text's; the image's are another suite's."""
        rows = {row for row in self.model.support() if not row.startswith("vision.")}
        assert rows == self.expected_rows() | set(ROOT_ROWS)

    def dims(self, value):
        """The keys of a cross-attention are no tokens, whose places a test could edit or compare."""
        dims = super().dims(value)
        return tuple("image" if axis == "key" else axis for axis in dims) if value.startswith("cross") else dims


class TextAlone(Mllama):
    """Without an image: the block in the middle is passed by."""

    LAYOUTS = {"called": {}, "passed_by": {"EDITED": CROSS}}

    #: What of the block in the middle there is, in which neighbour of it, under which name.
    PASSED = {"layer_input": ("layer_output", BEFORE), "layer_output": ("layer_input", AFTER)}

    def on(self, value, layer):
        passed = layer == CROSS and "." in value and not value.startswith("cross_attn")
        inside = layer == CROSS and "." not in value and value not in (*self.PASSED, *ROOT_VALUES, *self.roles())
        return not passed and not inside and super().on(value, layer)

    @classmethod
    def has(cls, layout, value):
        return not value.startswith("cross_attn.") and super().has(layout, value)

    def contributions(self):
        return [value for value in super().contributions() if self.has(self.layout_name, value)]

    def mixers(self, layer):
        return [] if layer == CROSS else super().mixers(layer)

    def expected_reason(self, value, layer):
        """What the block does not serve in a text it has all the same."""
        host = value.rpartition(".")[0]
        return None if layer == CROSS and host != "self_attn" else super().expected_reason(value, layer)

    def site(self, value, layer, bare):
        return super().site(*(self.PASSED.get(value, (value, layer)) if layer == CROSS else (value, layer)), bare)

    def hidden_states(self, output):
        states = output.hidden_states
        return (*states[: CROSS + 1], states[CROSS], *states[CROSS + 1 :])

    def test_what_is_inside_is_not_served(self):
        """It says why, at the line, on a read and on a write; the model works afterwards."""
        block = self.model.layers[CROSS]
        inside = ("attention_norm_output", "layer_mid", "mlp_norm_output", "mlp_input")
        for host, names in (
            (block, inside),
            (block.cross_attn, block.cross_attn.values()),
            (block.mlp, block.mlp.values()),
        ):
            for name in names:
                said = (f"^{name} of {host.path} was not served in this run", "attends to an image", "with its image")
                with mistake(OutOfOrderError, *said), self.model.trace(self.ids):
                    getattr(host, name).save()  # here
                with mistake(OutOfOrderError, *said), self.model.trace(self.ids):
                    setattr(host, name, torch.zeros(1))  # here
        with self.model.trace(self.ids):
            logits = self.model.logits.save()
        assert_same(logits, self.loaded.clean_logits)

    def test_all_blocks_can_be_skipped(self):
        with self.model.trace() as tracer:
            with tracer.invoke(self.ids[:1]):
                self.model.skip_layers(0, -1)
                logits = self.model.logits.save()
            with tracer.invoke(self.ids[1:]):
                self.model.skip_layers(0, -1, torch.zeros(1, self.ids.shape[1], 32))
                zeroed = self.model.logits.save()
        assert_same(logits, self.model.project_on_vocab(self.everything["layer_input", 0][:1]))
        assert not zeroed.any()


class TestWrapper(TextAlone):
    __test__ = True
    CHECKPOINT = OfTheWrapper
    NATIVE = {
        "embed_tokens": "model.language_model.embed_tokens",
        "layers": "model.language_model.layers",
        "norm": "model.language_model.norm",
    }


class TestTextGeneration(TextAlone):
    """The causal language model, whose logits are in float32."""

    __test__ = True
    CHECKPOINT = OfTheText
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}

    def test_lens_in_bfloat16(self):
        model = self.loaded.load(dtype=torch.bfloat16)
        with model.trace(self.ids):
            stream = model.layers[-1].layer_output.save()
            logits = model.logits.save()
        assert logits.dtype == torch.float32
        assert_same(model.project_on_vocab(stream), logits)


def features(ids: Tensor, like: Tensor) -> Tensor:
    """What an image would be projected to, ``[batch, IMAGE, hidden_size]``: another one for each last token."""
    ramp = torch.arange(IMAGE * like.shape[-1], device=ids.device).view(1, IMAGE, -1)
    return (ramp + ids[:, -1:, None]).sin().to(like.dtype)


def masks(ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Of four tokens one sees no tile, one the first and two both, as transformers makes masks of that."""
    tiles = torch.stack([ids % 4 > 0, ids % 4 > 1], -1).long()
    return modeling._prepare_cross_attention_mask(tiles[:, :, None], IMAGE // 2, like.dtype)


@pytest.fixture(scope="class")
def an_image(request):
    """Every call of the text model, nnterp's and the bare one's, has an image that is not in the cache yet."""
    plain = modeling.MllamaTextModel.forward

    @wraps(plain)
    def forward(self, input_ids=None, **kwargs):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if kwargs.get("cross_attention_states") is None:
            if not modeling._has_cached_cross_attention_states(cache, CROSS):
                kwargs["cross_attention_states"] = features(input_ids, self.norm.weight)
            mask, rows = masks(input_ids, self.norm.weight)
            kwargs |= {"cross_attention_mask": mask, "full_text_row_masked_out_mask": rows}
        return plain(self, input_ids=input_ids, **kwargs)

    modeling.MllamaTextModel.forward = forward
    yield
    modeling.MllamaTextModel.forward = plain


@pytest.mark.usefixtures("an_image")
class TestWithImage(Mllama):
    """With one: the suite on every block, the middle one's edits tried on each value."""

    __test__ = True
    CHECKPOINT = OfTheWrapper
    NATIVE = TestWrapper.NATIVE
    LAYOUTS = {"tokens": {}, "image": {"EDITED": CROSS}}

    def visible(self, layer):
        if layer != CROSS:
            return super().visible(layer)
        return torch.ones(self.ids.shape[1], IMAGE, dtype=torch.bool)

    def test_edit_of_one_token_changes_nothing_before_it(self, value):
        """An edited key of the image, in one row of two, changes that row alone."""
        if value not in ("cross_attn.attention_keys", "cross_attn.attention_values"):
            return super().test_edit_of_one_token_changes_nothing_before_it(value)

        def edit(served):
            edited = served.clone()
            edited[1, :, 3] *= -1
            return edited

        logits = self.assigned(value, edit)
        assert_same(logits[0], self.loaded.clean_logits[0])
        assert_differs(logits[1, -1], self.loaded.clean_logits[1, -1])
        assert_close(logits, self.edited(value, CROSS, edit), ULPS_AFTER_MODEL)
        return None


# -- an image itself --------------------------------------------------------------------------------------------------

#: An image of one tile where two would fit, before a prompt whose first token is the image's.
PIXELS = {
    "input_ids": torch.tensor([[300, 40, 41, 42, 43]]),
    "attention_mask": torch.ones(1, 5, dtype=torch.long),
    "pixel_values": torch.randn(1, 1, 2, 3, 16, 16, generator=torch.Generator().manual_seed(6)),
    "aspect_ratio_ids": torch.tensor([[1]]),
    "aspect_ratio_mask": torch.tensor([[[1, 0]]]),
    "cross_attention_mask": torch.tensor([[[[0, 0]], *[[[1, 0]]] * 4]]),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    suite = TestWrapper()
    suite.LAYOUTS = {"image": {}}
    return OfTheWrapper(suite, "image", tmp_path_factory.mktemp("mllama"))


def test_keys_are_the_projected_image(loaded):
    """Computed once, and attended to at each step of a generation; transformers skips the block in none of them."""
    model, bare = loaded.model, loaded.bare
    attention, projected = bare.model.language_model.layers[CROSS].cross_attn, []
    handle = bare.model.multi_modal_projector.register_forward_hook(lambda *call: projected.append(call[2].detach()))
    with torch.no_grad():
        output = bare.generate(**PIXELS, **greedy(3), return_dict_in_generate=True, output_logits=True)
    handle.remove()
    with torch.no_grad():
        expected = attention.k_norm(attention.k_proj(projected[0].reshape(1, -1, 32)).view(1, -1, 2, 8)).transpose(1, 2)
    block = model.layers[CROSS]
    with model.generate(**PIXELS, **greedy(3)) as tracer:
        keys, patterns, logits, sums = [].save(), [].save(), [].save(), [].save()
        for _ in tracer.iter[0:3]:
            terms = block.layer_input.clone()
            keys.append(block.cross_attn.attention_keys.clone())
            patterns.append(block.cross_attn.attention_probabilities.clone())
            terms = terms + block.cross_attn.attention_output + block.mlp.mlp_output
            sums.append((terms, block.layer_output.clone()))
            logits.append(model.logits[:, -1].clone())
    assert len(projected) == 1
    seen = torch.ones(1, 4, 1, expected.shape[2])
    seen[..., expected.shape[2] // 2 :] = 0
    for step in range(3):
        assert_close(keys[step], expected, ULPS_AFTER_MODEL)
        rows = patterns[step] if step else patterns[step][:, :, 1:]
        assert not (rows * (1 - seen)).any() and (rows * seen).sum(-1).allclose(torch.ones(1))
        assert_close(sums[step][0], sums[step][1])
        assert_close(logits[step], output.logits[step], ULPS_AFTER_MODEL)


def test_an_edit_of_the_image_in_the_cache_stays(loaded):
    """A key zeroed in place at the first step is zero at the next."""
    model = loaded.model
    attention = model.layers[CROSS].cross_attn
    with torch.no_grad(), model.generate(**PIXELS, **greedy(2)) as tracer:
        later, logits = [].save(), [].save()
        for step in tracer.iter[0:2]:
            if step == 0:
                attention.attention_keys[:, :, 0] = 0
            else:
                later.append(attention.attention_keys.clone())
            logits.append(model.logits.clone())
    with torch.no_grad():
        clean = loaded.bare(**PIXELS).logits
    assert not later[0][:, :, 0].any() and later[0][:, :, 1].all()
    assert_differs(logits[0][:, -1], clean[:, -1])
