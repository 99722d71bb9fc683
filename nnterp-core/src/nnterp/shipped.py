"""What nnterp itself ships: which of its packages serves a type, and how to install it.

The only place in the core that knows a model type by name. It is consulted when no installed plugin serves a type, so
that the message can say which package does; what is installed is asked, never looked up here.
"""

#: nnterp's own plugins in the order in which they are asked: distribution, and what to hand to pip for it.
PACKAGES = {
    "nnterp-families-dense": "nnterp",
    "nnterp-families-moe": "'nnterp[moe]'",
    "nnterp-families-recurrent": "'nnterp[recurrent]'",
    "nnterp-vision": "'nnterp[vision]'",
    "nnterp-vllm": "'nnterp[vllm]'",
}

#: The engines beside transformers, and the package that brings each.
ENGINES = {"vllm": "nnterp-vllm"}

#: The types each package serves, under the names their modules have (`module_name`).
FAMILIES = {
    "nnterp-families-dense": """
        apertus apertus1p5_text arcee biogpt bitnet bloom chameleon codegen cohere cohere2 cohere_compass_text
        cosmos3_edge_text cpmant ctrl cwm diffllama doge dory emu3_text_model ernie4_5 exaone exaone4 falcon
        gemma gemma2 gemma3_text gemma3n_text gemma4_unified_text glm glm4 glm4v_text glm_ocr_text gpt2
        gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_sw3 gptj granite granite4_vision_text
        granite_docling_text granite_swa helium hrm_text hunyuan_v1_dense hunyuan_vl_text hyperclovax idefics
        internlm3 iquestcoder jais2 kosmos_2_5_text_model kosmos_2_text_model llama minicpm3 ministral
        ministral3 mistral mllama_text_model modernbert_decoder molmo2_text mpt muse_glimmer_text nanochat
        nemotron olmo olmo2 olmo3 openai_gpt opt paddleocr_vl_text persimmon phi phi3 qwen2 qwen2_5_omni_text
        qwen2_5_vl_text qwen2_vl_text qwen3 qwen3_vl_text seed_oss smollm3 stablelm starcoder2 vaultgemma xglm
        youtu
    """,
    "nnterp-families-moe": """
        afmoe aria_text axk1 axk2 beam cohere2_moe dbrx deepseek_ocr2_text deepseek_v2 deepseek_v3 deepseek_v32
        deepseek_v4 dots1 dots3_note_text ernie4_5_moe ernie4_5_vl_moe_text exaone_moe flex_olmo flint
        gemma4_text glm4_moe glm4_moe_lite glm4v_moe_text glm_moe_dsa gpt_oss granitemoe granitemoe_swa
        granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 hy_v4_vl_text inkling2_loop_text inkling2_text inkling_text
        jetmoe kolibri1 laguna llama4_text longcat_flash mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text
        mistral4 mistral_large4_text mixtral muse_spark_text olmoe phimoe qwen2_moe qwen3_moe
        qwen3_omni_moe_text qwen3_vl_moe_text sarvam_mla sarvam_moe solar_open step3p5 unlimited_ocr_text
    """,
    "nnterp-families-recurrent": """
        bailing_hybrid bamba falcon_h1 falcon_mamba glm5_next_text granitemoehybrid jamba kimi_linear lara_mini
        lfm2 lfm2_moe lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next
        qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya
    """,
}


def module_name(model_type: str) -> str:
    """The name of a ``model_type``'s module: ``openai_gpt`` for ``"openai-gpt"``, as transformers names its folders."""
    return model_type.replace("-", "_").replace(".", "_")


def package_for(model_type: str, engine: str | None = None) -> str | None:
    """The distribution of nnterp's own that serves a type on an engine, whether it is installed or not."""
    if engine is not None:
        return ENGINES.get(engine)
    name = module_name(model_type)
    return next((distribution for distribution, names in FAMILIES.items() if name in names.split()), None)


def install(distribution: str) -> str:
    """The command that installs one of nnterp's own packages: ``pip install 'nnterp[moe]'``."""
    return f"pip install {PACKAGES[distribution]}"
