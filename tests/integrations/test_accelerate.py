"""accelerate: prompts divided between processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.paths import REFERENCE_LM, ROOT

SCRIPT = """\
import json, sys
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer
import hf_specgen

state = PartialState(cpu=True)
model = hf_specgen.attach(AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32), strict=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
prompts = ["def add(x, y):", "1, 2, 3, 1, 2,", "The quick brown fox"]
results = []
with state.split_between_processes(prompts) as mine:
    for prompt in mine:
        inputs = tokenizer(prompt, return_tensors="pt")
        ours = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        plain = model.generate(**inputs, max_new_tokens=16, do_sample=False, candidate_generator=None)
        results.append([prompt, torch.equal(ours, plain), hf_specgen.statistics(model).calls])
results = gather_object(results)
if state.is_main_process:
    with open(sys.argv[2], "w") as file:
        json.dump([state.num_processes, results], file)
"""


def test_split_between_processes_same_tokens_in_every_process(tmp_path: Path) -> None:
    script, answer = tmp_path / "script.py", tmp_path / "answer.json"
    script.write_text(SCRIPT)
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",  # `--cpu` starts one process only, whatever the number (accelerate 1.15)
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--main_process_port",
        "29617",
    ]
    subprocess.run(
        [*launch, "--mixed_precision", "no", "--dynamo_backend", "no", str(script), str(REFERENCE_LM), str(answer)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
    )
    processes, results = json.loads(answer.read_text())
    assert processes == 2
    assert results == [["def add(x, y):", True, 1], ["1, 2, 3, 1, 2,", True, 2], ["The quick brown fox", True, 1]]
