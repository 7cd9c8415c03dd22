"""``explain``, ``serve-args`` and ``check-checkpoint`` as a user runs them, without torch, SGLang and a GPU."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cpu_host.checkpoints import Spec, make
from tests.cli.bare import ROOT, Bare

QWEN = "nvidia/Qwen3.5-397B-A17B-NVFP4"
ON_8_CARDS = ("--tp", "8", "--card", "rtx-pro-6000")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    found = Bare(tmp_path_factory.mktemp("bare") / "packages")
    found.environment["COLUMNS"] = "160"
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("checkpoint") / "sound", Spec())


class TestExplain:
    def test_the_question_of_the_397b(self, bare: Bare) -> None:
        done = bare.run("explain", QWEN, *ON_8_CARDS)
        assert done.returncode == 0, done.stderr
        assert "reads 0.53 GB of FP4 and 2.46 GB of other weights on each rank" in done.stdout
        (flag,) = (line for line in done.stdout.splitlines() if "--fp4-gemm-backend" in line and "│" in line)
        assert "nothing here" in flag
        assert "121 all-reduces" in done.stdout
        assert "Predicted from bytes" in done.stdout

    def test_json(self, bare: Bare) -> None:
        done = bare.run("explain", QWEN, *ON_8_CARDS, "--batch", "4", "--json")
        report = json.loads(done.stdout)
        assert report["setup"] == {"tp": 8, "ep": 1, "batch": 4, "context": 4096, "kv_bytes": 1}
        assert report["weights"]["fp4_bytes"] > 3 * 530_841_600

    def test_a_checkpoint_folder(self, bare: Bare, checkpoint: Path) -> None:
        done = bare.run("explain", str(checkpoint), "--card", "rtx-5090", "--kv-dtype", "fp8", "--json")
        report = json.loads(done.stdout)
        assert report["model"]["quantization"] == "modelopt_fp4"
        assert report["setup"]["kv_bytes"] == 1
        assert str(checkpoint) not in done.stdout

    def test_without_a_card(self, bare: Bare) -> None:
        done = bare.run("explain", QWEN)
        assert done.returncode == 2
        assert "--card" in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (("nobody/nothing", "--card", "rtx-5090"), "qwen3.5-397b-a17b"),
            ((QWEN, "--tp", "3", "--card", "rtx-5090"), "--tp=3"),
            ((QWEN, "--card", "rtx-5090", "--kv-dtype", "int4"), "--kv-dtype='int4'"),
        ],
    )
    def test_what_cannot_be_is_one_line_and_exit_code_2(
        self, arguments: tuple[str, ...], named: str, bare: Bare
    ) -> None:
        done = bare.run("explain", *arguments)
        assert done.returncode == 2
        assert named in done.stderr
        assert "Traceback" not in done.stderr


class TestServeArgs:
    def test_the_command_can_be_pasted(self, bare: Bare) -> None:
        done = bare.run("serve-args", QWEN, *ON_8_CARDS)
        assert done.returncode == 0, done.stderr
        command = shlex.split(done.stdout.partition("\n\n")[0])
        assert command[:3] == ["python", "-m", "sglang.launch_server"]
        assert command[command.index("--moe-runner-backend") + 1] == "flashinfer_cutlass"
        assert "--fp4-gemm-backend" not in command
        assert "without --fp4-gemm-backend" in done.stdout
        assert "Written for SGLang" in done.stdout
        assert "Not installed here, and assumed: sglang, flashinfer" in done.stdout

    def test_a_check_without_sglang_cannot_be_asked_for(self, bare: Bare) -> None:
        done = bare.run("serve-args", QWEN, *ON_8_CARDS, "--check", "--json")
        assert done.returncode == 2
        assert done.stdout == ""
        assert "--check cannot be used" in done.stderr

    def test_ranks_follow_the_number_of_cards(self, bare: Bare) -> None:
        done = bare.run("serve-args", QWEN, "--gpus", "6", "--card", "rtx-pro-6000", "--json")
        assert json.loads(done.stdout)["tp"] == 4

    def test_a_preset_is_served_by_the_id_of_its_checkpoint(self, bare: Bare) -> None:
        done = bare.run("serve-args", "qwen3-32b", "--card", "rtx-5090", "--json")
        command = json.loads(done.stdout)["command"]
        assert command[command.index("--model-path") + 1] == "nvidia/Qwen3-32B-NVFP4"

    def test_sglangs_own_parser_takes_the_command(self) -> None:
        command = [sys.executable, "-m", "sglang_sm120.cli.main", "serve-args", QWEN, *ON_8_CARDS, "--check", "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
        assert json.loads(done.stdout)["check"] == {"accepted": True, "objection": None}
        assert done.returncode == 0

    def test_a_flag_that_the_parser_does_not_know_is_named(self) -> None:
        from sglang_sm120.host.parse_command import objection

        found = objection(["--model-path", "x", "--mamba-scheduler-strategy-of-old", "extra_buffer"])
        assert found is not None
        assert "--mamba-scheduler-strategy-of-old" in found


class TestCheckCheckpoint:
    def test_a_sound_one(self, bare: Bare, checkpoint: Path) -> None:
        done = bare.run("check-checkpoint", str(checkpoint), "--tp", "2")
        assert done.returncode == 0, done.stdout
        assert "No error, 0 warning(s)." in done.stdout
        assert "14 nvfp4" in done.stdout

    def test_a_bad_one(self, bare: Bare, checkpoint: Path, tmp_path: Path) -> None:
        bad = tmp_path / "bad"
        shutil.copytree(checkpoint, bad)
        tensors = load_file(bad / "model.safetensors")
        name = "model.layers.0.mlp.down_proj.weight_scale_2"
        tensors[name] = torch.tensor(float("inf"))
        save_file(tensors, bad / "model.safetensors")
        done = bare.run("check-checkpoint", str(bad))
        assert done.returncode == 1
        line, row = (line for line in done.stdout.splitlines() if "scale-not-finite" in line)
        assert f"error scale-not-finite: {name} = inf:" in line
        assert row.replace("│", "").split() == ["error", "scale-not-finite", "1"]
        assert "export the checkpoint again" in line
        assert json.loads(bare.run("check-checkpoint", str(bad), "--json").stdout)["errors"] == 1

    def test_no_checkpoint(self, bare: Bare, tmp_path: Path) -> None:
        done = bare.run("check-checkpoint", str(tmp_path / "nothing"))
        assert done.returncode == 2
        assert "PATH=" in done.stderr
        assert not os.listdir(tmp_path)
