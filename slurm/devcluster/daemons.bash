# Start, find and stop the cluster's processes, each by its recorded pid.
# Sourced by devcluster; uses $state and die.
# shellcheck shell=bash disable=SC2154
#
# A record is a file $state/run/NAME.pid with a pid and its start time in clock
# ticks: after a reboot or a wrap of pids the pair names no other process.

start_ticks() { # PID -> field 22 of its stat; the name before it may hold blanks
    local stat
    { stat=$(<"/proc/$1/stat"); } 2>/dev/null || return 1
    # A zombie has ended, even where nobody reaps it (a container without an init).
    # shellcheck disable=SC2086  # to be split
    set -- ${stat##*) }
    [ "$1" != Z ] && echo "${20}"
}

daemon_pid() { # NAME -> its pid, or failure when it does not run
    local pid ticks
    { read -r pid ticks <"$state/run/$1.pid"; } 2>/dev/null || return 1
    [ "$(start_ticks "$pid")" = "$ticks" ] && echo "$pid"
}

start_daemon() { # NAME HOST COMMAND...: in the background, in a session of its own
    local name=$1 host=$2 pid
    shift 2
    if daemon_pid "$name" >/dev/null; then return 0; fi
    # Each of setsid, env and nsenter becomes the next, so $! stays the daemon's pid.
    # Without 9>&- the daemon would hold the lock of `devcluster` for ever.
    setsid -- env -i PATH="$PATH" LC_ALL="$LC_ALL" SLURM_CONF="$state/etc/daemons.conf" \
        MYSQL_UNIX_PORT="$state/run/mariadb/socket" \
        nsenter --uts="$state/run/$host.uts" -- "$@" </dev/null >>"$state/log/$name.log" 2>&1 9>&- &
    pid=$!
    echo "$pid $(start_ticks "$pid")" >"$state/run/$name.pid"
}

stop_daemon() { # NAME SECONDS: TERM, then KILL
    local pid
    pid=$(daemon_pid "$1") || { rm -f "$state/run/$1.pid"; return 0; }
    kill -TERM "$pid" 2>/dev/null || true
    wait_until "$2" daemon_gone "$1" || kill -KILL "$pid" 2>/dev/null || true
    wait_until 10 daemon_gone "$1" || die "$1 (pid $pid) does not end, even by SIGKILL"
    rm -f "$state/run/$1.pid"
}

kill_daemon() { # NAME: SIGKILL, as a crash would
    local pid
    pid=$(daemon_pid "$1") || die "$1 is not running"
    kill -KILL "$pid"
    wait_until 10 daemon_gone "$1" || die "$1 (pid $pid) does not end, even by SIGKILL"
    rm -f "$state/run/$1.pid"
}

daemon_gone() { ! daemon_pid "$1" >/dev/null; }

wait_until() { # SECONDS COMMAND...: poll until the command succeeds
    local deadline=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.1
    done
}

need() { # NAME SECONDS COMMAND...: wait for a daemon to answer, or say why it does not
    local name=$1 limit=$2 deadline=$((SECONDS + $2))
    shift 2
    until "$@" >/dev/null 2>&1; do
        if daemon_gone "$name"; then
            tail -n 15 "$state/log/$name.log" >&2
            die "$name ended while it started; the end of $state/log/$name.log is above"
        fi
        [ "$SECONDS" -lt "$deadline" ] || die "$name does not answer after $limit s; see $state/log/$name.log"
        sleep 0.1
    done
}

# --- hosts: a UTS name space gives each node a host name, and holds all it runs ----

make_host() { # NAME
    local file="$state/run/$1.uts"
    host_id "$1" >/dev/null && return 0
    : >"$file"
    # The bind mount keeps the name space, and so its identity, while no process is in it.
    unshare --uts="$file" -- hostname "$1" ||
        die "cannot make a UTS name space for $1: devcluster needs root with CAP_SYS_ADMIN"
}

host_id() { # NAME -> identity of its name space, or failure when there is none
    # A plain file: made, but not (or, since a reboot, no longer) bound to a name space.
    [ "$(stat -f -c %T "$state/run/$1.uts" 2>/dev/null)" = nsfs ] && stat -c '%d:%i' "$state/run/$1.uts"
}

host_pids() { # NAME -> pids of every process of that host, double-forked or not
    local id pid
    id=$(host_id "$1") || return 0
    for pid in /proc/[0-9]*; do
        [ "$(stat -L -c '%d:%i' "$pid/ns/uts" 2>/dev/null)" != "$id" ] || echo "${pid#/proc/}"
    done
}

host_empty() { [ -z "$(host_pids "$1")" ]; }

sweep_host() { # NAME: end by pid what its node left behind (steps outlive a slurmd)
    local pid
    for pid in $(host_pids "$1"); do
        kill -KILL "$pid" 2>/dev/null || true
    done
    wait_until 10 host_empty "$1" || die "processes of $1 do not end: $(host_pids "$1" | paste -sd' ' -)"
}

# Programs expect a node's name to resolve; /etc/hosts is rewritten in place, since in
# a container it is a mount that cannot be renamed over.
hosts_mark="# devcluster in $state"

name_hosts() { # NAME...
    unname_hosts
    echo "127.0.0.1 $* $hosts_mark" >>/etc/hosts || die "cannot write /etc/hosts: the names of the nodes must resolve"
}

unname_hosts() {
    local others
    grep -q "$hosts_mark\$" /etc/hosts || return 0
    others=$(grep -v "$hosts_mark\$" /etc/hosts)
    printf '%s\n' "$others" >/etc/hosts
}

remove_host() { # NAME
    if host_id "$1" >/dev/null; then
        sweep_host "$1"
        umount "$state/run/$1.uts"
    fi
    rm -f "$state/run/$1.uts"
}
