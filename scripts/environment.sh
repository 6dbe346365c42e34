# Sourced by the other scripts: a .venv beside pyproject.toml with the extras asked for, made or brought up to date.
# Usage: prepare_environment EXTRA[,EXTRA...]

prepare_environment() {
  local extras=$1 python=${PYTHON:-python3} stamp wanted
  if [ ! -x .venv/bin/python ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
      { echo "budgetdb needs Python 3.11 or newer; set PYTHON to one" >&2; exit 1; }
    echo "making .venv" >&2
    "$python" -m venv .venv
  fi
  stamp=.venv/budgetdb-$extras.stamp
  wanted=$(cksum < pyproject.toml)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing budgetdb[$extras] into .venv" >&2
    # A pinned torch is taken as it is; whoever wants another build installs it into .venv first.
    .venv/bin/python -c 'import torch' 2>/dev/null || .venv/bin/python -m pip install --quiet torch==2.13.0
    .venv/bin/python -m pip install --quiet --editable ".[$extras]"
    echo "$wanted" > "$stamp"
  fi
}
