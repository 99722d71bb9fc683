"""How a checkpoint becomes a model: which family, which envoys, and the places where nnsight's load path needs help."""

from collections.abc import Iterable
from pkgutil import resolve_name
from typing import Any

from nnsight import Envoy
from nnsight.intervention.aliasing import named
from nnsight.modeling import peft
from nnsight.modeling.quantization import resolve_load_kwargs
from nnsight.modeling.tp.envoys import tp_envoys, wants_tensor_parallel
from torch import nn

from nnterp import families, wrappers
from nnterp.components.sharded import WholeValues
from nnterp.families import UnsupportedFamily
from nnterp.shipped import module_name, package_for

# -- the family -------------------------------------------------------------------------------------------------------


def resolve_family(repo_id: Any, family: Any, kwargs: dict) -> Any:
    """The family of this load: the one passed, else the one of the config's ``model_type``."""
    if family is not None:
        return with_maps(family, "family= takes")
    config = read_config(repo_id, kwargs)
    model_type = (getattr(config, "text_config", None) or config).model_type
    if model_type not in families.REGISTRY:
        refuse_encoders(config, model_type)
    return with_maps(families.lookup(model_type), f"the family of {model_type!r} is")


def resolve_overlay(repo_id: Any, kwargs: dict) -> Any | None:
    """The overlay of a multimodal wrapper, which has its image side; None where nothing installed has one."""
    if isinstance(repo_id, nn.Module) and getattr(repo_id, "config", None) is None:
        return None
    config = read_config(repo_id, kwargs)
    if getattr(config, "vision_config", None) is None:
        return None
    overlay = families.wrapper(config.model_type)
    return None if overlay is None else with_maps(overlay, f"the overlay of {config.model_type!r} is")


def with_maps(family: Any, what: str) -> Any:
    """``family``, which has to have its two maps."""
    missing = [name for name in ("RENAME", "ENVOYS") if not isinstance(getattr(family, name, None), dict)]
    if missing:
        raise TypeError(
            f"{what} a module or object with the dicts RENAME and ENVOYS; {family!r} has no {' and no '.join(missing)}"
        )
    return family


def read_config(repo_id: Any, kwargs: dict) -> Any:
    """The checkpoint's config: a ready module's own, the ``config=`` of the call, else transformers' AutoConfig."""
    if isinstance(repo_id, nn.Module):
        if getattr(repo_id, "config", None) is None:
            raise ValueError(
                f"{type(repo_id).__name__} has no config to tell its model type by: pass family= (and task=, "
                f"tokenizer=)"
            )
        return repo_id.config
    if kwargs.get("config") is not None:
        return kwargs["config"]
    from transformers import AutoConfig

    passed = {name: kwargs[name] for name in ("revision", "trust_remote_code", "token") if name in kwargs}
    import_own_modeling(repo_id, passed)
    return AutoConfig.from_pretrained(repo_id, **passed)


def import_own_modeling(repo_id: str, passed: dict) -> None:
    """Import the family of a type that transformers does not know: its plugin registers the modeling code with it."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    declared = PretrainedConfig.get_config_dict(repo_id, **passed)[0].get("model_type")
    if declared is not None and declared not in CONFIG_MAPPING and module_name(declared) in families.known():
        families.lookup(declared)


#: Encoders whose config has no flag that says so.
ENCODERS = ("xlm", "xlnet")


def refuse_encoders(config: Any, model_type: str) -> None:
    """Raise UnsupportedFamily for a checkpoint that is no decoder-only model.

    A type that some package serves, installed here or not, is one: GPT-NeoX's config has a flag that denies it.
    """
    from transformers.models.auto import modeling_auto

    if module_name(model_type) in families.known() or package_for(model_type) is not None:
        return
    # A decoder that transformers cuts out of an encoder-decoder is flagged as the decoder it is; its type is not.
    halves = (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    )
    if getattr(config, "is_encoder_decoder", False) or any(config.model_type in names for names in halves):
        kind = "an encoder-decoder"
    elif getattr(config, "is_decoder", None) is False or config.model_type in ENCODERS:
        kind = "an encoder, whose attention looks both ways,"
    else:
        return
    raise UnsupportedFamily(
        f"{config.model_type!r} is {kind} and nnterp standardizes decoder-only transformers: trace it with nnsight's "
        f"TransformersModel"
    )


# -- a wrapper --------------------------------------------------------------------------------------------------------


#: The names a load's dtype goes by.
DTYPES = ("dtype", "torch_dtype")


def build_wrapper(model: Any, repo_id: str, kwargs: dict) -> nn.Module | None:
    """The module of a lazy text-generation load of a multimodal checkpoint, without weights; None for any other load.

    The auto class of text generation builds few wrappers. Where it does not, the class that the checkpoint names is
    what a load with weights falls back on, and so what is built here; nnsight 0.8.1 has no such fallback. Called
    inside nnsight's meta build.
    """
    if model.task != "text-generation" or kwargs.get("config") is not None:
        return None
    if wrappers.generates_text(read_config(repo_id, {"revision": model.revision, **kwargs})):
        return None
    from transformers import AutoConfig, AutoModelForImageTextToText, pipeline

    kwargs = resolve_load_kwargs(kwargs, quantize=False)
    # "auto" is the dtype of the weights, of which there are none yet: the config's own stands for it.
    kwargs = {name: value for name, value in kwargs.items() if not (name in DTYPES and value == "auto")}
    fields = {name: value for name, value in kwargs.items() if name != "quantization_config"}
    config = AutoConfig.from_pretrained(repo_id, revision=model.revision, return_unused_kwargs=True, **fields)[0]
    options = {name: kwargs[name] for name in (*DTYPES, "trust_remote_code", "attn_implementation") if name in kwargs}
    module = AutoModelForImageTextToText.from_config(config, **options)
    if model.peft is not None:
        peft.attach(module, model.peft, weights=False)
    trusted = {"trust_remote_code": kwargs["trust_remote_code"]} if "trust_remote_code" in kwargs else {}
    model.pipeline = pipeline(model.task, model=module, device="meta", **model._preprocessor_sources(), **trusted)
    model._sync()
    return module


# -- the two maps and the interleaver ---------------------------------------------------------------------------------


def base_envoys(repo_id: Any, kwargs: dict) -> dict:
    """nnsight's tensor-parallel envoys on a sharded load: a map passed to it replaces them, so they have to be in
    ours.
    """
    if not wants_tensor_parallel(repo_id, kwargs):
        return {}
    restore_parameter_plan()
    return tp_envoys()


def envoy_classes(*maps: dict) -> dict:
    """The envoy class of each module by type or name, a later map over an earlier one.

    Where all keys are types there is one for every module: nnsight otherwise spells the path of each module that has
    none in every way the aliases allow, to look for it among the names.
    """
    merged = {key: kind for each in maps for key, kind in each.items()}
    if not any(isinstance(key, str) for key in merged):
        merged.setdefault(nn.Module, Envoy)
    return merged


def interleaver(kind: type) -> Any:
    """The run's driver, with nnsight's own handling of values that tensor parallelism splits."""
    return kind(fragments=WholeValues())


def restore_parameter_plan() -> None:
    """nnsight 0.8.1 imports a name that transformers 5.23 moved; without it a sharded load fails."""
    from transformers.distributed import tensor_parallel

    if not hasattr(tensor_parallel, "_get_parameter_plan"):
        from transformers.distributed import parallel_utils

        tensor_parallel._get_parameter_plan = parallel_utils._get_parameter_plan


def check_names(model: Any, rename: dict) -> None:
    """Raise ValueError for an alias the caller asked for by which no module goes, or something else than its own."""
    for key, aliases in rename.items():
        found = [(envoy, target) for envoy in model.modules() for _, target in named(envoy, key)]
        if not found:
            raise ValueError(
                f"rename={{{key!r}: {aliases!r}}} names no module of {type(model._module).__name__}: a key is a path "
                f"from the root ('transformer.h') or a module's own name ('attn'); print(model._module) shows them"
            )
        for alias in [aliases] if isinstance(aliases, str) else aliases:
            prefix, _, name = alias.rpartition(".")
            for envoy, target in found:
                host = envoy.get(prefix) if prefix else envoy
                if host.__dict__.get(name) is not target:
                    raise ValueError(
                        f"rename={{{key!r}: {alias!r}}}: {name!r} is a name that {host.path} has for something else; "
                        f"take another"
                    )


# -- preprocessors ----------------------------------------------------------------------------------------------------


def pipeline_class(task: str) -> Any:
    """The class of transformers' pipeline for ``task``.

    nnsight 0.8.1 reads its flags off what the pipeline registry holds, which from transformers 5.23 on is the class's
    dotted name; no preprocessor is loaded then, and a lazy build fails with "Impossible to guess which tokenizer to
    use".
    """
    from transformers.pipelines import check_task

    found = check_task(task)[1]["impl"]
    return resolve_name(found) if isinstance(found, str) else found


def loaded_preprocessors(task: str) -> set[str]:
    """Which preprocessors the pipeline of ``task`` loads."""
    kind = pipeline_class(task)
    names = ("tokenizer", "image_processor", "feature_extractor", "processor")
    return {name for name in names if getattr(kind, f"_load_{name}", False)}


def has_preprocessors(model: Any) -> bool:
    """Whether a ready module came with something to read text with, or knows the checkpoint it is from."""
    return any(
        getattr(model, name) is not None for name in ("tokenizer", "processor", "image_processor", "feature_extractor")
    ) or bool(model.repo_id)


def refuse_headless(module: nn.Module, task: str) -> None:
    """Raise UnsupportedFamily for a ready model that cannot generate where ``task`` is to: it has no head to read.

    transformers' pipeline builds such a model in part, and fails at an attribute that it left out.
    """
    generates = getattr(module, "can_generate", None)
    if getattr(pipeline_class(task), "_pipeline_calls_generate", False) and not (generates and generates()):
        raise UnsupportedFamily(
            f"{type(module).__name__} has no language-model head, and {task} needs one: load the checkpoint with its "
            f"head (AutoModelForCausalLM), or trace this module with nnsight's TransformersModel and a task= of its own"
        )


def wrap_without_tokenizer(model: Any, module: nn.Module, device: Any) -> nn.Module:
    """A ready module with no tokenizer: the pipeline is built without one, and token ids and tensors trace."""
    model.pipeline = pipeline_class(model.task)(model=module, tokenizer=None, task=model.task, device=device)
    return model._finalize_pipeline()


def refuse_text_without_tokenizer(model: Any, invokes: Iterable[tuple]) -> None:
    """Raise ValueError where text is to be traced and there is nothing to tokenize it with."""
    if model.tokenizer is not None or model.processor is not None:
        return
    for inputs, _ in invokes:
        first = inputs[0] if inputs else None
        while isinstance(first, (list, tuple)) and first:
            first = first[0]
        if isinstance(first, (str, dict)) and not (isinstance(first, dict) and "input_ids" in first):
            raise ValueError(
                "this model has no tokenizer, so it cannot be traced on text: pass token ids (a list or a tensor), or "
                "build it with tokenizer=AutoTokenizer.from_pretrained(...)"
            )


def set_tokenizer_attributes(tokenizer: Any, attributes: dict) -> None:
    """``tokenizer_kwargs``: each name set on the tokenizer that was loaded."""
    if attributes and tokenizer is None:
        raise ValueError(f"tokenizer_kwargs={attributes!r}: there is no tokenizer to set them on")
    for name, value in attributes.items():
        if not hasattr(tokenizer, name):
            raise ValueError(f"tokenizer_kwargs: {type(tokenizer).__name__} has no attribute {name!r}")
        setattr(tokenizer, name, value)


def without_prefix_space(model: Any) -> Any:
    """The model's tokenizer loaded again with ``add_prefix_space=False``."""
    from transformers import AutoTokenizer

    source = model.tokenizer.name_or_path or model.repo_id
    return AutoTokenizer.from_pretrained(source, revision=model.revision, add_prefix_space=False)
