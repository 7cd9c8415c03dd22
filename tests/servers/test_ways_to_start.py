"""Every way to start SGLang takes the value, refuses a wrong one, and ends without a trace."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cpu_host.checkpoints import Spec
from cpu_host.server import Generation, Server, free_port
from tests.support.checkpoints import Checkpoints
from tests.support.servers import NEW_TOKENS, PROMPT, ask, interpreter, judge, launch

pytestmark = pytest.mark.server
SPEC = Spec(format="modelopt")

ENGINE = """
import json, sys
import sglang

if __name__ == "__main__":
    request = json.load(sys.stdin)
    engine = sglang.Engine(**request["engine"])
    answer = engine.generate(**request["generate"])
    engine.shutdown()
    meta = answer["meta_info"]
    print("ANSWER", json.dumps([meta["input_token_logprobs"], meta["output_token_logprobs"]]))
"""


def test_sglang_serve(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints.folder(SPEC)
    command = (str(interpreter("dev").with_name("sglang")), "serve")
    with Server(launch(SPEC, folder, tmp_path, command=command)) as server:
        assert judge(ask(server), checkpoints.reference(folder)).agrees
        leftover = server.stop()
    assert leftover == []
    assert server.crash_lines() == []


def test_engine(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints.folder(SPEC)
    (tmp_path / "engine.py").write_text(ENGINE, encoding="utf-8")
    options = {
        "model_path": str(folder),
        "quantization": "modelopt_fp4",
        "fp4_gemm_runner_backend": "torch_reference",
        "device": "cpu",
        "attention_backend": "torch_native",
        "max_total_tokens": 2048,
        "port": free_port(),
    }
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    generate = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    run = subprocess.run(
        [str(interpreter("dev")), "-W", "ignore", str(tmp_path / "engine.py")],
        input=json.dumps({"engine": options, "generate": generate}),
        env=launch(SPEC, folder, tmp_path).environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    answers = [line for line in run.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, run.stderr[-3000:]
    prompt, output = json.loads(answers[0].removeprefix("ANSWER "))
    answer = Generation("", [t[1] for t in output], [t[0] for t in output], [t[0] for t in prompt[1:]])
    assert judge(answer, checkpoints.reference(folder)).agrees


def test_a_value_that_nobody_has_is_refused_and_ours_are_offered(checkpoints: Checkpoints, tmp_path: Path) -> None:
    wrong = launch(SPEC, checkpoints.folder(SPEC), tmp_path, backend="sm120_bogus")
    run = subprocess.run(
        wrong.command_line(free_port()),
        env=wrong.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 2, run.stderr[-3000:]
    assert "sm120_bogus" in run.stderr
    assert "torch_reference" in run.stderr
