#!/bin/bash
#SBATCH --job-name=@NAME@
#SBATCH --output=@OUTPUT@
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@@SIGNAL_S@
@RESOURCES@
# --- Your site. `foray submit --template FILE` writes a copy of this file; edit it and set launch.slurm.template=FILE.
# `##SBATCH` is a comment. A line `#CORE ...` or `#ENGINE ...` is an `#SBATCH` line of that job only.
##SBATCH --account=mine
##SBATCH --partition=gpu
#CORE --time=24:00:00
#CORE --cpus-per-task=8
#ENGINE --time=4:00:00
#ENGINE --cpus-per-task=4
# Name of a node for the others, one of `foray init --secure --hosts`:
host=$(hostname)
# module load cuda; . ~/venv/bin/activate
# --- End of your site.
set -u
cd @DIRECTORY@ || exit 1
child='' stopped=''
# Slurm sends SIGTERM to all processes of a job; `foray down` and fewer engines send SIGUSR2 to this script alone.
trap 'stopped=term' TERM
trap 'stopped=term; [ -z "$child" ] || kill -TERM "$child"' USR2
trap 'stopped=time; [ -z "$child" ] || kill -TERM "$child"' USR1 # the time limit is near, or a preemption

supervise() { # runs a command and returns its exit code; a signal to this script reaches it through the traps
  "$@" &
  child=$!
  while kill -0 "$child" 2>/dev/null; do wait "$child"; done
  wait "$child"
}

core() {
  export MASTER_ADDR=$host MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
  supervise @PYTHON@ -m foray up @CONFIG@ launch.redis=own "launch.redis_host=$host" @LEARNER@
  code=$?
  case $stopped in
    term) ;; # cancelled, preempted or requeued: Slurm knows what follows
    time) scontrol requeue "$SLURM_JOB_ID" ;;
    *) scancel --quiet --user="$(id -un)" --name=@ENGINES@ ;; # the run has ended
  esac
  exit "$code"
}

engine() {
  until [ -s @REDIS_FILE@ ] && [ -s @RESOLVED@ ]; do # the core writes both
    [ -z "$stopped" ] || exit 0
    sleep 2
  done
  if [ -n @SECRETS@ ]; then
    set -a
    . @SECRETS@/node.env
    set +a
    local login=${FORAY_REDIS_URL#*://}
    export FORAY_REDIS_URL="file://${login%%@*}@@REDIS_PATH@"
  fi
  supervise @PYTHON@ -m foray engine @RESOLVED@ "engine.id=engine-$SLURM_ARRAY_TASK_ID" "engine.role=rollout" engine.port=0
  code=$?
  case $stopped$code in
    term* | 0 | 2) ;; # told to, or an error that would come again
    *) scontrol requeue "$SLURM_JOB_ID" ;;
  esac
  exit "$code"
}

@PART@
