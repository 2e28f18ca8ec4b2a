# Sourced by the other scripts: where things are, and how to speak to the person.
# shellcheck shell=bash
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
deps=$root/build/deps
venv=$root/.venv
cd "$root"

for switch in CUDNN PYTHON TORCH; do
  case ${!switch:=on} in
    on | off) ;;
    *) echo "$switch=${!switch}: expected on or off" >&2; exit 2 ;;
  esac
  export "${switch?}"
done

# Tools that set-up put into .venv, and headers that it unpacked without root, are found by these.
[ ! -d "$venv/bin" ] || export PATH="$venv/bin:$PATH"
[ ! -d "$deps/debian/usr" ] ||
  export CMAKE_PREFIX_PATH="$deps/debian/usr${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}"

say() { printf '%s\n' "$*" >&2; }
fail() { printf '%s\n' "$@" >&2; exit 3; }

# One job per core, but no more than one per 2 GB: a compile of the larger files takes about 1 GB.
jobs() {
  local cores mem
  cores=$(nproc 2>/dev/null || echo 2)
  mem=$(awk '/^MemTotal/ {print int($2 / 2000000)}' /proc/meminfo 2>/dev/null || echo 2)
  [ "$mem" -ge 1 ] || mem=1
  echo $((cores < mem ? cores : mem))
}

# NAME [VERSION]: is the tool on PATH, and at least that new?
have_tool() {
  command -v "$1" >/dev/null || return 1
  [ -n "${2:-}" ] || return 0
  local have
  have=$("$1" --version 2>/dev/null | grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1)
  [ "$(printf '%s\n' "$2" "$have" | sort -V | head -n 1)" = "$2" ]
}

# The first command of the names given that exists and is of LLVM 14, which formats alike everywhere.
llvm14() {
  local name
  for name in "$1-14" "$1"; do
    if "$name" --version 2>/dev/null | grep -q 'version 14\.'; then echo "$name"; return; fi
  done
  return 1
}

# The folder that holds the venv's installed packages.
site_packages() { echo "$venv"/lib/python3*/site-packages; }
