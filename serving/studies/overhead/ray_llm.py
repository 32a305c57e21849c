"""A program that serves one model with `ray.serve.llm`, as its documentation has it.

Owns nothing of ours: it is what the stack is measured against. Started with
`python -m serving.studies.overhead.ray_llm FILE`; FILE holds a `RayLlmSettings` as JSON.
Whether Python's proxy or direct streaming answers is decided by Ray's own environment
variables, which whoever starts this program sets. SIGTERM ends Ray and the program.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from serving.studies.overhead.settings import RayLlmSettings


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    settings = RayLlmSettings.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import ray
    from ray import serve

    # "local": never another cluster of this machine.
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=settings.temp,
    )
    # After ray.init, which sets a handler of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        _serve(settings)
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()


def _serve(settings: RayLlmSettings) -> None:
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.llm import LLMConfig, build_openai_app

    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=settings.port))
    config = LLMConfig(
        model_loading_config={"model_id": settings.model_id, "model_source": settings.source},
        engine_kwargs=settings.engine_kwargs,
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundles": [{"CPU": 1}]},
        runtime_env={"env_vars": settings.env},
    )
    serve.run(build_openai_app({"llm_configs": [config]}), blocking=False)


if __name__ == "__main__":
    main()
