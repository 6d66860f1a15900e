"""The exact command line and environment of an SGLang engine (0.5), from its documented server arguments."""

from __future__ import annotations

from collections.abc import Mapping

from homeport_engines.launch import Connector, Launch, LaunchError, LaunchRequest, Speculation, draft_model

BACKENDS: Mapping[Connector, str] = {"nixl": "nixl", "mooncake": "mooncake"}
STORES: Mapping[Connector, tuple[str, ...]] = {
    "lmcache": ("--enable-lmcache",),
    "mooncake-store": ("--enable-hierarchical-cache", "--hicache-storage-backend", "mooncake"),
    "shared-folder": ("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
}
ALGORITHMS: Mapping[str, str] = {
    "ngram": "NGRAM",
    "eagle3": "EAGLE3",
    "draft-model": "STANDALONE",
    "mtp": "NEXTN",
}


def command(request: LaunchRequest) -> Launch:
    """The launch of one engine. Pure: opens nothing, asks nothing. Raises LaunchError for what cannot work."""
    if request.kv_readback:
        raise LaunchError("--kv-readback is vLLM's, with --kv nixl; leave it out")
    argv = [*(request.program or ("python", "-m", "sglang.launch_server")), "--model-path", request.model]
    if request.served_name:
        argv += ["--served-model-name", request.served_name]
    argv += ["--host", request.host, "--port", str(request.port)]
    argv += _sizes(request)
    # cached tokens in usage, and the metrics that routing reads, are both off by default
    argv += ["--enable-cache-report", "--enable-metrics"]
    if request.tool_parser:
        argv += ["--tool-call-parser", request.tool_parser]
    argv += _transfer(request)
    notes: tuple[str, ...] = ()
    if request.speculation is not None:
        more, notes = _speculative(request, request.speculation)
        argv += more
    env = {} if request.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, request.gpus))}
    return Launch(tuple(argv), env, notes)


def _sizes(request: LaunchRequest) -> list[str]:
    argv: list[str] = []
    if request.dtype:
        argv += ["--dtype", request.dtype]
    if request.max_model_len is not None:
        argv += ["--context-length", str(request.max_model_len)]
    if request.shape is not None:
        argv += ["--chunked-prefill-size", str(request.shape.batched_tokens)]
        argv += ["--max-running-requests", str(request.shape.sequences)]
    if request.tensor_parallel > 1:
        argv += ["--tp-size", str(request.tensor_parallel)]
    if request.data_parallel > 1:
        argv += ["--dp-size", str(request.data_parallel)]
    return argv


def _transfer(request: LaunchRequest) -> list[str]:
    if request.kv in STORES:
        if request.role != "mixed":
            raise LaunchError(f"SGLang hands KV over by nixl or mooncake; --kv {request.kv} goes with --role mixed")
        return list(STORES[request.kv])
    if request.role == "mixed":
        return []
    if request.kv not in BACKENDS:
        raise LaunchError(f"a {request.role} engine of SGLang needs --kv nixl or --kv mooncake, not {request.kv}")
    argv = ["--disaggregation-mode", request.role, "--disaggregation-transfer-backend", BACKENDS[request.kv]]
    if request.role == "prefill":
        argv += ["--disaggregation-bootstrap-port", str(request.bootstrap_port)]
    return argv


def _speculative(request: LaunchRequest, wanted: Speculation) -> tuple[list[str], tuple[str, ...]]:
    """Both roles speculate alike: SGLang hands the draft's state over with the KV."""
    if wanted.method == "custom":
        raise LaunchError("--spec as JSON is vLLM's form; SGLang takes a preset")
    algorithm = ALGORITHMS.get(wanted.method)
    if algorithm is None:
        raise LaunchError(f"SGLang has no speculative method {wanted.method!r}; use {', '.join(ALGORITHMS)}")
    argv = ["--speculative-algorithm", algorithm]
    notes: tuple[str, ...] = ()
    if wanted.needs_draft:
        model, notes = draft_model(request, wanted)
        argv += ["--speculative-draft-model-path", model]
    if wanted.method == "ngram":
        return [*argv, "--speculative-num-draft-tokens", str(wanted.tokens)], notes
    # one chain of guesses: n steps give n + 1 tokens to verify
    argv += ["--speculative-num-steps", str(wanted.tokens), "--speculative-eagle-topk", "1"]
    return [*argv, "--speculative-num-draft-tokens", str(wanted.tokens + 1)], notes
