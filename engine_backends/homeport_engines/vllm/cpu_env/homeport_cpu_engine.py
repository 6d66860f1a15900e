"""Tunes vLLM's CPU build for a small machine; loaded by vLLM in each of its processes as a general plugin.

Three changes:

- NIXL's progress thread polls without a pause and takes a whole core of each engine. It now rests between polls.
- The engine core is forked from the API server instead of spawned: it need not import everything a second time
  (start 38 s -> 23 s on two cores). vLLM's CPU platform always asks for `spawn`; the fork happens before any OpenMP
  thread exists.
- torch has no accelerator here and raises when asked for the current one's number, which the Mooncake connector does
  at import. It is told 0.
"""

import os

PROGRESS_REST_US = 2000


def apply() -> None:
    """Called by vLLM (entry point group `vllm.general_plugins`); safe to call again."""
    _fork_engine_core()
    _rest_nixl_progress_thread()
    _number_the_missing_accelerator()


def _fork_engine_core() -> None:
    from vllm.platforms.cpu import CpuPlatform  # type: ignore[import-not-found,unused-ignore]

    whole = CpuPlatform.check_and_update_config.__func__
    if getattr(whole, "by_homeport", False):
        return

    def check_and_update_config(cls: type, vllm_config: object) -> None:
        whole(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    check_and_update_config.by_homeport = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _rest_nixl_progress_thread() -> None:
    # UCX must hold few unreleased registrations (a leak otherwise); vLLM sets this only if it imports NIXL first
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    try:
        from nixl_cu12 import _bindings  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return
    plain = _bindings.nixlAgentConfig
    if getattr(plain, "by_homeport", False):
        return
    delay = plain.pthrDelay

    class RestingAgentConfig(plain):  # type: ignore[misc,valid-type]
        by_homeport = True

        @property
        def pthrDelay(self) -> int:  # noqa: N802 - NIXL's name
            return int(delay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, microseconds: int) -> None:  # noqa: N802
            delay.__set__(self, max(microseconds, PROGRESS_REST_US))

    _bindings.nixlAgentConfig = RestingAgentConfig


def _number_the_missing_accelerator() -> None:
    import torch  # type: ignore[import-not-found,unused-ignore]

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
