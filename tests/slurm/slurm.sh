#!/usr/bin/env bash
# Starts and stops a Slurm of one node on this host, for tests: slurm.sh start|stop. As root,
# without systemd, with Debian's slurm-wlm. Refuses to touch a Slurm that it has not made.
set -euo pipefail

CONFIG=/etc/slurm/slurm.conf
MARK='# Made by tests/slurm/slurm.sh'
STATE=/var/lib/crystalllm-slurm

missing() {
  for tool in munged slurmctld slurmd sbatch squeue scancel; do
    command -v "$tool" >/dev/null || [ -x "/usr/sbin/$tool" ] || echo "$tool"
  done
}

configure() {
  local host cores memory
  host=$(hostname -s)
  cores=$(nproc --all) # nproc alone heeds OMP_NUM_THREADS
  memory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
  if [ -e "$CONFIG" ] && ! grep -qF "$MARK" "$CONFIG"; then
    echo "There is a Slurm here already. File $CONFIG. Leave it alone, or run this elsewhere." >&2
    exit 2
  fi
  mkdir -p /etc/slurm "$STATE/ctld" "$STATE/d"
  cat >"$CONFIG" <<END
$MARK
ClusterName=crystalllm
SlurmctldHost=$host
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=$STATE/ctld
SlurmdSpoolDir=$STATE/d
SlurmctldPidFile=$STATE/slurmctld.pid
SlurmdPidFile=$STATE/slurmd.pid
SlurmctldLogFile=$STATE/slurmctld.log
SlurmdLogFile=$STATE/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge=600
NodeName=$host CPUs=$cores RealMemory=$memory State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
END
}

start() {
  local lacking
  lacking=$(missing)
  if [ -n "$lacking" ]; then
    echo "Slurm is not installed. Missing:" $lacking". Install slurm-wlm and munge." >&2
    exit 3
  fi
  configure
  export PATH="$PATH:/usr/sbin"
  mkdir -p /run/munge /var/log/munge /var/lib/munge
  [ -e /etc/munge/munge.key ] || dd if=/dev/urandom of=/etc/munge/munge.key bs=1024 count=1 2>/dev/null
  chown -R munge: /run/munge /var/log/munge /var/lib/munge /etc/munge
  chmod 0400 /etc/munge/munge.key
  pgrep -r R,S,D,I -x munged >/dev/null || setpriv --reuid munge --regid munge --clear-groups munged --force
  pgrep -r R,S,D,I -x slurmctld >/dev/null || slurmctld
  pgrep -r R,S,D,I -x slurmd >/dev/null || slurmd
  for _ in $(seq 60); do
    if [ "$(sinfo --noheader --format %t 2>/dev/null)" = idle ]; then
      return
    fi
    sleep 0.5
  done
  echo "Slurm did not come up within 30 s. Logs in $STATE. Read them." >&2
  tail -n 20 "$STATE"/*.log >&2
  exit 1
}

stop() {
  for name in slurmd slurmctld; do
    [ -e "$STATE/$name.pid" ] && kill "$(cat "$STATE/$name.pid")" 2>/dev/null || true
  done
  pkill -x munged || true
  if grep -qsF "$MARK" "$CONFIG"; then
    rm -f "$CONFIG"
  fi
}

case "${1:-}" in
  start) start ;;
  stop) stop ;;
  missing) missing ;;
  *)
    echo "usage: slurm.sh start|stop|missing" >&2
    exit 2
    ;;
esac
