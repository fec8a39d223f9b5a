#!/usr/bin/env bash
# A training run under mpirun, which starts the processes itself: no launcher, no profile. From the folder of the project:
#   examples/clusters/mpi.sh 8 templates/text_classification.py --config examples/bert_mrpc/recipe.yaml
#   MPI_OPTIONS="--hostfile hosts -x MASTER_ADDR=node0" examples/clusters/mpi.sh 16 templates/...
# Rank and number of processes come from Open MPI. Where all run on one machine, so does the address at which they meet;
# on several, MASTER_ADDR has to name the first one. Precision and device are options of the script and variables.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "error: give the number of processes and a script: mpi.sh 8 SCRIPT.py --config RECIPE.yaml" >&2
    exit 2
fi
processes=$1
shift
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

# shellcheck disable=SC2086 # the options are words
exec mpirun -np "$processes" -x OMP_NUM_THREADS -x OMP_WAIT_POLICY ${MPI_OPTIONS:-} \
    "${PYTHON:-.venv/bin/python}" "$@"
