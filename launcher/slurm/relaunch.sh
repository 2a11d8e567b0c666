# --- From here on every batch script of AsyncFlow is the same: launch, stop in time, queue again ---------------------

# A restart continues from the run's newest checkpoint, or from step 1 if there is none yet. What this script was told
# to resume from counts only for its first start, so it comes first.
launch+=("$@")
restarts=${SLURM_RESTART_COUNT:-0}
if ((restarts > 0)) && [[ -e $run_dir/config.yaml ]]; then
    launch+=(--resume latest)
fi

# In the background, because bash runs traps only between commands. When the first launcher has gone, the others have
# `gather_s` seconds to follow: long enough to save, and nobody waits forever.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait="$gather_s" "${srun_options[@]}" "${launch[@]}" &
step=$!
launched_at=$SECONDS

# Slurm signals this shell: USR1 ahead of the time limit, TERM when it ends the job itself. srun passes USR1 on to the
# launchers, which save the last completed step and exit with 75. It loses signals in its first moments.
stop() {
    stopping=yes
    while ((SECONDS < launched_at + 3)); do sleep 1; done
    kill -USR1 "$step" 2> /dev/null
}
trap stop USR1 TERM
if [[ -n $stopping ]]; then stop; fi

# A signal ends `wait` early: wait until the step is gone, and only then ask for its exit code, the highest of all.
while kill -0 "$step" 2> /dev/null; do wait "$step"; done
wait "$step"
code=$?

# 75: stopped, resumable. Above 128: a launcher was killed, maybe by a signal that it could not handle yet. 1 ahead
# of the limit: the stop failed, or the step had not begun. Done (0), failed (1) and wrong command (2) are final.
if ! ((code == 75 || code > 128)) && ! [[ $code == 1 && -n $stopping ]]; then exit "$code"; fi

for _ in 1 2 3 4 5 6; do
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
    if [[ $state == RUNNING && $restarts -ge $max_requeues ]]; then
        echo "asyncflow: stopped; not queued again after $restarts restarts (max_requeues=$max_requeues)." \
            "To continue, submit the script again with --resume latest behind its name"
        exit 1
    elif [[ $state == RUNNING ]]; then
        echo "asyncflow: stopped; queued again, restart $((restarts + 1)) of at most $max_requeues"
        scontrol requeue "$SLURM_JOB_ID" && exit 0
    elif [[ -n $state ]]; then
        exit "$code" # Slurm is ending the job: cancelled for good, or preempted and in the queue already
    fi
    sleep 10 # the controller does not answer
done
echo "asyncflow: stopped; Slurm's controller did not take the job back for a minute." \
    "To continue, submit the script again with --resume latest behind its name"
exit 1
