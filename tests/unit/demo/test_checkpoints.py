"""The shipped demo checkpoints and the text they were trained on."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open

from serving.demo import NAMES, checkpoint_path, corpus

pytestmark = pytest.mark.parametrize("name", NAMES)


def test_the_weights_fit_the_package(name: str) -> None:
    assert (checkpoint_path(name) / "model.safetensors").stat().st_size < 12e6


def test_the_head_is_in_the_checkpoint(name: str) -> None:
    with safe_open(checkpoint_path(name) / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
    } <= names


def test_the_config_avoids_what_breaks_drafting_on_a_cpu(name: str) -> None:
    config = json.loads((checkpoint_path(name) / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == 1
    assert "mrope_section" not in config["rope_parameters"]
    assert config["head_dim"] in (64, 128)


def test_the_chat_template_is_the_corpus_own(name: str) -> None:
    template = (checkpoint_path(name) / "chat_template.jinja").read_text()
    assert template == corpus.CHAT_TEMPLATE
