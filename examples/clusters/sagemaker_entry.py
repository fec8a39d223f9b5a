"""What a SageMaker training job starts: a template, with one process for each GPU of the job's instances.

A job gets the folder of the script that is sent. So copy this file to the top of a project that `make new` made, and
start it from there:

    python launch.py --config_file configs/sagemaker.yaml sagemaker_entry.py --script text_classification.py \\
        --config recipe.yaml

Options of the script are pairs of a name and a value. The run directory is where SageMaker keeps checkpoints.
"""

import argparse
import json
import os
import sys

OUTPUT_DIR = "/opt/ml/checkpoints/run"  # copied to the job's checkpoint_s3_uri, and from there when it starts again
PORT = 29500


def command_of(arguments: list[str], environment: dict) -> list[str]:
    """Return what to start on this instance, from the options of the job and the variables that SageMaker sets."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--script", required=True)
    known, options = parser.parse_known_args(arguments)
    hosts, gpus = json.loads(environment["SM_HOSTS"]), int(environment["SM_NUM_GPUS"])
    processes = len(hosts) * max(1, gpus)
    if len(hosts) > 1:
        profile = ["configs/multi_node.yaml", "--num_machines", len(hosts), "--main_process_port", PORT]
        profile += ["--main_process_ip", hosts[0], "--machine_rank", hosts.index(environment["SM_CURRENT_HOST"])]
    else:
        profile = ["configs/multi_gpu.yaml" if processes > 1 else "configs/single_gpu.yaml"]
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    command = ["launch.py", "--config_file", *profile, "--num_processes", processes, "--mixed_precision", precision]
    return [sys.executable, *map(str, command), known.script, *options, "--output_dir", OUTPUT_DIR]


if __name__ == "__main__":
    command = command_of(sys.argv[1:], dict(os.environ))
    os.execv(command[0], command)  # signals and the exit code are those of the launcher
