"""The part of launch.sh that brings several machines together for mpirun. Knows nothing of ranks."""

from __future__ import annotations

SSH_PORT = 2222
SSH_KEYS = "/etc/mpi-ssh"  # where the pods find id_ed25519 and id_ed25519.pub

# Three ways to say where the machines are: HOSTFILE (one a line, `name slots=N`), a LeaderWorkerSet's environment, or
# MPI_HOSTS with the pods of a StatefulSet. The one key pair serves as everybody's identity, host keys included, so
# that nothing is trusted on first use.
MPI_HOSTS = (
    f"""\
# One machine leads: it waits for the others and starts all ranks. `launch.sh worker`, or a pod whose index is not 0,
# lends its cards to the leader.
start_sshd() {{{{
    install -d -m 700 ~/.ssh /run/sshd
    install -m 600 {SSH_KEYS}/id_ed25519 ~/.ssh/id_ed25519
    install -m 600 {SSH_KEYS}/id_ed25519.pub ~/.ssh/authorized_keys
    printf '[*]:{SSH_PORT} %s\\n' "$(cat {SSH_KEYS}/id_ed25519.pub)" > ~/.ssh/known_hosts
    printf 'Host *\\n  Port {SSH_PORT}\\n  StrictHostKeyChecking yes\\n' > ~/.ssh/config
    /usr/sbin/sshd -p {SSH_PORT} -h ~/.ssh/id_ed25519 -o PasswordAuthentication=no -o PidFile=none "$@"
}}}}
"""
    """\
if [ "${{1:-}}" = worker ] || [ "${{POD_INDEX:-0}}" != 0 ]; then
    start_sshd -D -e
    exit
fi
if [ -n "${{LWS_LEADER_ADDRESS:-}}" ]; then
    MPI_HOSTS=$LWS_LEADER_ADDRESS
    for i in $(seq $((LWS_GROUP_SIZE - 1))); do
        MPI_HOSTS+=" ${{LWS_LEADER_ADDRESS%%.*}}-$i.${{LWS_LEADER_ADDRESS#*.}}"
    done
fi
if [ -n "${{MPI_HOSTS:-}}" ]; then
    start_sshd
    HOSTFILE=$(mktemp)
    for host in $MPI_HOSTS; do
        until ssh -o ConnectTimeout=5 "$host" true 2>/dev/null; do
            [ $SECONDS -lt {budget_s} ] || {{ echo "launch.sh: no answer from $host in {budget_s} s" >&2; exit 1; }}
            sleep 2
        done
        echo "$host slots={slots}" >> "$HOSTFILE"
    done
fi
: "${{HOSTFILE:?names the machines, one a line with slots={slots}}}"
prefix=$(dirname "$(dirname "$(command -v mpirun)")")  # the others find it there, whatever their shell's PATH
exports="-x PATH -x LD_LIBRARY_PATH $(compgen -e | sed -n 's/^\\(NCCL\\|UCX\\)_/-x &/p' | tr '\\n' ' ')"
"""
)
