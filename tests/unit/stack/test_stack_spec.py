"""The stack file's rules, each by the whole message a user sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.catalog.errors import ConfigError
from serving.catalog.yaml_file import parse_yaml
from serving.stack.load import load_stack, shipped_stacks
from serving.stack.spec import StackSpec

HEAD = "schema: 1\nname: s\nmodels:\n  - model: tiny-moe\n    gpu: cpu\n"
PLAIN = "    variants: {plain: }\n"
DRAFTING = (
    "    variants:\n      mtp:\n        speculative: {method: mtp, num_speculative_tokens: 2}\n"
)


def stack(text: str) -> StackSpec:
    return parse_yaml(text, StackSpec, name="s.yaml")


def message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        stack(text)
    return str(caught.value)


def test_the_least_file_fills_in_id_and_default_variant() -> None:
    model = stack(HEAD + PLAIN).models[0]
    assert (model.id, model.default_variant, model.variants["plain"].speculative) == (
        "tiny-moe",
        "plain",
        None,
    )


def test_the_gateway_s_defaults_are_finite_and_local() -> None:
    gateway = stack(HEAD + PLAIN).gateway
    assert (gateway.host, gateway.port, gateway.max_ongoing_requests) == ("127.0.0.1", 8000, 1024)
    assert (gateway.max_body_mib, gateway.cors_origins, gateway.tls) == (16, (), None)


@pytest.mark.parametrize("host", ["0.0.0.0", "'::'", "192.0.2.7", "gpu-1"])
def test_other_machines_are_let_in_by_words_only(host: str) -> None:
    text = HEAD.replace("models:", f"gateway: {{host: {host}ACCESS}}\nmodels:") + PLAIN
    with pytest.raises(ConfigError, match=r"gateway.access: absent, but host .* lets other mach"):
        stack(text.replace("ACCESS", ""))
    for access in ("keys", "open"):
        assert stack(text.replace("ACCESS", f", access: {access}")).gateway.access == access


def test_a_drafting_block_becomes_vllm_s_own_without_empty_fields() -> None:
    speculative = stack(HEAD + DRAFTING).models[0].variants["mtp"].speculative
    assert speculative is not None
    assert speculative.to_vllm() == {"method": "mtp", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            HEAD + DRAFTING.replace("tokens", "token"),
            "s.yaml:8: models[0].variants.mtp.speculative.num_speculative_token: "
            "did you mean num_speculative_tokens?",
        ),
        (
            HEAD + DRAFTING.replace("method: mtp", "method: qwen3_5_mtp"),
            "s.yaml:8: models[0].variants.mtp.speculative.method: "
            "found 'qwen3_5_mtp', an old name in vLLM; write `method: mtp`",
        ),
        (
            HEAD + DRAFTING.replace("tokens: 2", "tokens_per_batch_size: [[1, 2, 2]]"),
            "s.yaml:8: models[0].variants.mtp.speculative.num_speculative_tokens_per_batch_size: "
            "refused: changing n under load is slow and alters the text of these models in "
            "vLLM 0.32; write one variant for each n and choose between the variants",
        ),
        (
            HEAD + "    env: {TOKENIZERS_PARALLELISM: 'false', HF_TOKEN: x}\n" + PLAIN,
            "s.yaml:6: models[0].env.HF_TOKEN: a stack file is no place for secrets; "
            "set it in the environment instead",
        ),
        (
            HEAD + "    engine_args: {enable_prefix_caching: true}\n" + PLAIN,
            "s.yaml:6: models[0].engine_args.enable_prefix_caching: "
            "has a field of its own; write prefix_caching outside engine_args",
        ),
        (
            HEAD + "    engine_args: {api_key: x}\n" + PLAIN,
            "s.yaml:6: models[0].engine_args.api_key: "
            "refused: the stack makes its engines' key itself; remove it",
        ),
        (
            HEAD + "    variants: {plain: {max_model_len: 9000}}\n",
            "s.yaml:6: models[0].variants.plain.max_model_len: "
            "found 9000; the model takes 8192 tokens, lower it",
        ),
        (
            HEAD + "    replicas: 2\n    autoscaling: {max_replicas: 3}\n" + PLAIN,
            "s.yaml:6: models[0].replicas: given beside autoscaling; keep one of the two",
        ),
        (
            HEAD + "    id: a@b\n" + PLAIN,
            "s.yaml:6: models[0].id: found 'a@b'; write letters, digits and . _ : / - only "
            "(@ separates id and variant)",
        ),
        (
            HEAD + "    variants: {MTP 2: }\n",
            "s.yaml:6: models[0].variants.MTP 2: found 'MTP 2'; write up to 40 lower-case "
            "letters, digits and -, a letter or digit at both ends",
        ),
        (
            HEAD + "    variants: {a: , b: }\n",
            "s.yaml:4: models[0].default_variant: missing; add `default_variant: ...` "
            "(the variant that answers where none is asked for)",
        ),
        (
            HEAD + "    default_variant: mtp\n" + PLAIN,
            "s.yaml:6: models[0].default_variant: found 'mtp'; the variants are plain",
        ),
        (
            HEAD + PLAIN + "  - {id: x, aliases: [tiny-moe], model: tiny-dense, gpu: cpu, "
            "variants: {plain: }}\n",
            "s.yaml:7: models[1].aliases[0]: 'tiny-moe' is taken by models[0].id; "
            "choose another name",
        ),
        (
            HEAD.replace("model: tiny-moe", "id: x") + PLAIN,
            "s.yaml:4: models[0]: found neither model nor inline; give one of the two",
        ),
        (
            HEAD.replace("model: tiny-moe", "id: x")
            + "    inline: {path: w, repo: a/b, max_context: 9}\n"
            + PLAIN,
            "s.yaml:6: models[0].inline: found both path and repo; give one of the two",
        ),
        (
            HEAD.replace("model: tiny-moe", "id: x")
            + "    inline: {repo: a/b, max_context: 99, mtp_head: false}\n"
            + DRAFTING,
            "s.yaml:9: models[0].variants.mtp.speculative.method: found mtp, but the checkpoint "
            "holds no MTP head; choose a checkpoint with one, name a drafting checkpoint under "
            "speculative.model, or drop the block",
        ),
        (
            HEAD + "    variants: {plain: {prefix_caching: true}}\n",
            "s.yaml:6: models[0].variants.plain.prefix_caching: found true, but on a CPU vLLM "
            "cannot cache the prefixes of these models; remove it",
        ),
        (
            HEAD.replace("tiny-moe", "qwen3.6-27b") + "    checkpoint: fp8\n" + PLAIN,
            "s.yaml:5: models[0].gpu: found cpu, but the checkpoint is fp8, which needs a GPU; "
            "choose a bf16 checkpoint or a GPU class",
        ),
        (
            HEAD.replace("model: tiny-moe", "id: x")
            + "    inline: {path: /w/x.gguf, max_context: 99}\n"
            + PLAIN,
            "s.yaml:6: models[0].inline: found a GGUF checkpoint (/w/x.gguf), which vLLM does not "
            "serve for these models; choose another checkpoint",
        ),
        (HEAD.replace("1", "2", 1) + PLAIN, "s.yaml:1: schema: found 2; should be 1"),
    ],
)
def test_a_wrong_file_is_refused_with_place_finding_and_cure(text: str, expected: str) -> None:
    assert message(text) == expected


def test_an_unknown_model_names_the_near_one() -> None:
    assert message(HEAD.replace("tiny-moe", "tiny-mo") + PLAIN).startswith(
        "s.yaml:4: models[0].model: No model is called 'tiny-mo'. Did you mean tiny-moe?"
    )


def test_an_argument_vllm_does_not_have_names_the_near_one() -> None:
    pytest.importorskip("vllm", reason="names are checked where vLLM is installed")
    assert message(HEAD + "    engine_args: {block_sise: 16}\n" + PLAIN) == (
        "s.yaml:6: models[0].engine_args.block_sise: did you mean block_size?"
    )


def test_argument_names_are_those_of_vllm_s_dataclasses() -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    from dataclasses import fields

    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    from serving.engines.vllm_args import argument_names

    named = {
        field.name for kind in (arg_utils.AsyncEngineArgs, FrontendArgs) for field in fields(kind)
    }
    assert argument_names() == {name for name in named if not name.startswith("_")}


def test_names_and_relative_paths_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    text = HEAD.replace("name: s\n", "").replace("model: tiny-moe", "id: x")
    path.write_text(text + "    inline: {path: w, max_context: 99}\n" + PLAIN)
    loaded = load_stack(path)
    assert loaded.name == "lab"
    assert loaded.models[0].checked_source().path == tmp_path / "w"


@pytest.mark.parametrize("name", shipped_stacks())
def test_every_shipped_stack_loads_by_its_name(name: str) -> None:
    assert load_stack(name).name == name


def test_an_unknown_stack_names_the_shipped_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        load_stack("dmo")
    assert str(caught.value) == (
        "dmo: no such stack file; did you mean demo? give a path or one of "
        + ", ".join(shipped_stacks())
    )
