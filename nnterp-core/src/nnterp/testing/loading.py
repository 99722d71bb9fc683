"""The same values however the checkpoint came to be a model: lazily, as a ready module, in bfloat16, under SDPA."""

import re
from typing import Any

import pytest
import torch

from nnterp import StandardizedTransformer, Unavailable
from nnterp.testing.comparing import ULPS, ULPS_AFTER_MODEL, assert_close, assert_same
from nnterp.testing.edits import edit_of
from nnterp.testing.facts import ROOT_VALUES, Facts


class Loading(Facts):
    #: The sizes that every model of the family has.
    SIZES = ("num_layers", "hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")

    def assert_everything(self, model: Any) -> None:
        """``model`` serves what the plain load does, bit by bit."""
        for place, read in self.read_all(model).items():
            assert_same(read, self.everything[place])

    def test_lazy_load(self) -> None:
        """Names, sizes and availability need no weights; the first trace loads them."""
        model = self.loaded.load(dispatch=False)
        assert model.support() == self.model.support()
        assert [getattr(model, size) for size in self.SIZES] == [getattr(self.model, size) for size in self.SIZES]
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        self.assert_everything(model)

    def test_first_trace_of_a_lazy_load_edits(self) -> None:
        model = self.loaded.load(dispatch=False)
        with model.trace(self.ids):
            model.layers[self.EDITED].layer_output = model.layers[self.EDITED].layer_output * 0.5
            logits = model.logits.save()
        assert_close(logits, self.edited("layer_output", self.EDITED, lambda old: old * 0.5), ULPS_AFTER_MODEL)

    def test_ready_module(self) -> None:
        """With a tokenizer, text can be traced; without one, token ids, and text says what is missing."""
        prompt = "The quick brown fox"
        model = StandardizedTransformer(self.loaded.load_bare(), tokenizer=self.model.tokenizer)
        self.assert_everything(model)
        ids = self.model.tokenizer(prompt, return_tensors="pt")["input_ids"]
        expected = self.bare(**self.inputs(ids)).logits
        with model.trace(prompt):
            logits = model.logits.save()
        assert_same(logits, expected)

        model = StandardizedTransformer(self.loaded.without_path())
        self.assert_everything(model)
        with pytest.raises(ValueError, match="tokenizer"), model.trace(prompt):
            model.logits.save()
        for tokens in (ids, ids.tolist(), ids[0].tolist()):
            with model.trace(tokens):
                logits = model.logits.save()
            assert_same(logits, expected)

    def assigned_as_bare(self, values: list[str], model: Any, bare: Any, ulps: float) -> None:
        """Each of ``values`` assigned in ``model`` gives the logits of the same edit by a hook in ``bare``."""
        for value in values:
            layer = None if value in ROOT_VALUES else self.block_of(value)
            host, name = self.host(value, layer, model)
            edit = edit_of(value)
            with model.trace(self.ids):
                setattr(host, name, edit(getattr(host, name)))
                logits = model.logits.save()
            assert_close(logits, self.edited(value, layer, edit, bare=bare), ulps)

    # -- bfloat16 -----------------------------------------------------------------------------------------------------

    def test_bfloat16(self) -> None:
        """Every value read, and every value assigned, against the bare model in bfloat16."""
        model = self.loaded.load(dtype=torch.bfloat16)
        bare = self.loaded.load_bare(dtype=torch.bfloat16)
        values = self.served()
        expected = self.oracle(values, self.blocks, bare=bare)
        for place, read in self.read_all(model).items():
            assert_close(read, expected[place])
        self.assigned_as_bare(values, model, bare, ULPS)

    # -- SDPA ---------------------------------------------------------------------------------------------------------

    def under_sdpa(self) -> dict[str, str]:
        """What is unavailable under SDPA, as EXPECTED_UNAVAILABLE says it of eager attention."""
        parts = ("self_attn.attention_scores", "self_attn.attention_probabilities")
        eager_only = [value for part in parts for value in self.of_kind(part)]
        return self.UNDER_SDPA or {**dict.fromkeys(eager_only, "attn_implementation"), **self.EXPECTED_UNAVAILABLE}

    def test_sdpa(self) -> None:
        """What is at the attention call is served all the same and edits reach it; scores and pattern say why not."""
        if not self.SDPA:
            return
        model = self.loaded.load(attn_implementation="sdpa")
        bare = self.loaded.load_bare(attn_implementation="sdpa")
        missing = self.under_sdpa()
        rows = {**model.support(), **model.support(layer=self.EDITED)}
        for value, reason in rows.items():
            assert (reason is None) == (value not in missing), f"{value}: {reason}"
            if reason is not None:
                assert missing[value] in reason
                host, name = self.host(value, self.EDITED, model)
                with pytest.raises(Unavailable, match=re.escape(missing[value])), model.trace(self.ids):
                    getattr(host, name)

        values = [value for value in self.all_values() if model.support().get(value, "no row") is None]
        expected = self.oracle(values, self.blocks, bare=bare)
        for place, read in self.read_all(model, values=values).items():
            assert_close(read, expected[place])
            if place in self.everything:
                assert_close(read, self.everything[place], ULPS_AFTER_MODEL)
        self.assigned_as_bare(values, model, bare, ULPS_AFTER_MODEL)
