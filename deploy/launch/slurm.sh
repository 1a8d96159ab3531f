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
child='' sent='' told='' asked='' again=''
trap 'told=yes' TERM        # Slurm sends it to all processes of a job that is cancelled, preempted or requeued
trap 'asked=yes; pass_on' USR2 # `foray down` and fewer engines, to this script alone
trap 'again=yes; pass_on' USR1 # the time limit is near, or a preemption: perhaps with SIGTERM at the same time

pass_on() { # one SIGTERM to the command: a second one would not let it finish
  [ -n "$child" ] && [ -z "$sent" ] || return 0
  sent=yes
  kill -TERM "$child"
}

supervise() { # runs a command and returns its exit code; a signal to this script reaches it through the traps
  "$@" &
  child=$!
  [ -z "$asked$again" ] || pass_on
  # no `wait` here: of two signals that interrupt it at once, bash runs the trap of one
  while kill -0 "$child" 2>/dev/null; do sleep 1; done
  wait "$child"
}

leave() { # ends this job; it starts again if its time was over, unless a stop was asked for
  [ -n "$asked" ] || [ -z "$again" ] || scontrol requeue "$SLURM_JOB_ID"
  exit "$1"
}

core() {
  export MASTER_ADDR=$host MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
  supervise @PYTHON@ -m foray up @CONFIG@ launch.backend=slurm launch.redis=own "launch.redis_host=$host" @LEARNER@
  code=$?
  # the run has ended, unless a signal came: then Slurm, `foray down` or the requeue below knows what follows
  [ -n "$told$asked$again" ] || scancel --quiet --user="$(id -un)" --name=@ENGINES@
  leave "$code"
}

engine() {
  until [ -s @REDIS_FILE@ ] && [ -s @RESOLVED@ ]; do # the core writes both
    [ -z "$told$asked$again" ] || leave 0
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
  case $told$code in
    yes* | 0 | 2) ;; # Slurm ended it, it has drained, or an error that would come again
    *) again=yes ;;
  esac
  leave "$code"
}

@PART@
