#!/usr/bin/env bash
# From a model to what is published: a bundle as a tar file, its SHA-256, its bill of materials, and a signature.
# docs/build/ci-pipeline.md explains the steps; a GitHub Actions workflow and a Dockerfile beside this file run it.
#
#   pipeline.sh MODEL OUT
#
#   MODEL   a Hugging Face folder or a GGUF file
#   OUT     the folder to write to; made if it isn't there
#
# In the environment:
#
#   NAME     of what is written; by default MODEL's
#   RECIPE   a recipe's name or file (f32). Its [budget] says how far the bundle may be from the model
#   TARGETS  what to build for ("cpu onnx")
#   GPUS     compute capabilities, such as "8.9 12.0": engines for these are built too (none)
#   CONTEXT  the longest request in tokens (the recipe's)
#   AGAINST  the bundle before this one, or another model: the new one has to be as good (none)
#   BUDGET   how much worse it may be: a file such as budget.toml (optimize verify's own)
#   SIGN     1 signs with sigstore's client (0)
#   SOURCE_DATE_EPOCH   the time that the bill of materials says (none)
#
# Any step that fails ends it, with that step's exit code.
set -euo pipefail

if [ $# -ne 2 ]; then
  echo "usage: pipeline.sh MODEL OUT" >&2
  exit 2
fi
model=$1
out=$2
name=${NAME:-$(basename "${model%.gguf}")}
read -ra targets <<<"${TARGETS:-cpu onnx}"
read -ra gpus <<<"${GPUS:-}"
sign=${SIGN:-0}

# What is missing is said now, and not after an hour's work.
if [ "$sign" = 1 ] && ! python3 -m sigstore --version >/dev/null 2>&1; then
  echo "SIGN=1 needs sigstore's client; install it with: pip install sigstore" >&2
  exit 10
fi

if [ -n "${AGAINST:-}" ] && [ ! -e "$AGAINST" ]; then
  echo "AGAINST: $AGAINST doesn't exist" >&2
  exit 3
fi
if [ -n "${BUDGET:-}" ] && [ ! -f "$BUDGET" ]; then
  echo "BUDGET: $BUDGET isn't a file" >&2
  exit 8
fi

step() { echo "== $*" >&2; }

options=(--recipe "${RECIPE:-f32}" --json --quiet)
for target in "${targets[@]}"; do options+=(--target "$target"); done
if [ -n "${CONTEXT:-}" ]; then options+=(--context "$CONTEXT"); fi
if [ ${#gpus[@]} -gt 0 ]; then
  options+=(--target tensorrt-rtx)
  for gpu in "${gpus[@]}"; do options+=(--gpu "$gpu"); done
fi

mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d "$out/.pipeline-XXXXXX")
trap 'rm -rf "$work"' EXIT
bundle=$work/$name.bundle

step "export ${targets[*]} ${gpus[*]}"
optimize export "$model" --output "$bundle" "${options[@]}" >"$out/export.json"

step "verify against the model, within the recipe's budget"
optimize verify "$bundle" --source "$model" --json --quiet >"$out/verify.json"

if [ -n "${AGAINST:-}" ]; then
  step "compare with the build before, within its budget"
  gate=(--against "$AGAINST" --junit "$out/verify.xml")
  if [ -n "${BUDGET:-}" ]; then gate+=(--budget "$BUDGET"); fi
  status=0
  optimize verify "$bundle" "${gate[@]}" || status=$?  # its table is for whoever reads the log
  if [ "$status" = 18 ]; then
    echo "warning: the machine is too busy to compare speed; all else is within the budget" >&2
  elif [ "$status" != 0 ]; then
    exit "$status"
  fi
fi

step "export again: is it the same?"
optimize export "$model" --output "$work/again.bundle" "${options[@]}" >/dev/null
optimize diff "$bundle" "$work/again.bundle"
rm -rf "$work/again.bundle"

step "what this machine can run of it"
# A machine that builds need not run anything of what it builds: 15 is no failure here.
optimize doctor "$bundle" --json >"$out/doctor.json" || [ $? -eq 15 ]

step "bill of materials"
optimize sbom "$bundle" --source "$model" --output "$out/$name.cdx.json"

# The same bundle gives the same file: no times, no owners, one order. report/ has times, and is published beside it.
step "pack"
tar --create --file "$out/$name.tar" --directory "$work" --anchored --no-wildcards --exclude "$name.bundle/report" \
  --format=gnu --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX "$name.bundle"
cp "$bundle/report/report.html" "$out/report.html"
(cd "$out" && sha256sum "$name.tar" "$name.cdx.json" >"$name.sha256")

if [ "$sign" = 1 ]; then
  step "sign"
  (cd "$out" && python3 -m sigstore sign --overwrite "$name.tar" "$name.cdx.json")
fi

step "what was packed is what was exported"
mkdir "$work/unpacked"
(cd "$out" && sha256sum --check --quiet "$name.sha256")
tar --extract --file "$out/$name.tar" --directory "$work/unpacked"
optimize verify "$work/unpacked/$name.bundle" --quiet
optimize diff "$bundle" "$work/unpacked/$name.bundle" --quiet

step "done"
cat "$out/$name.sha256"
