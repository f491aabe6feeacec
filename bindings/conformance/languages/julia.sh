# SPDX-License-Identifier: Apache-2.0
# The interpreter over FSDP.jl, which needs Julia 1.5. usage: see ../README.md; JULIA names another one than julia
set -u
if [ "$1" = prepare ]; then
  sh bindings/julia/julia.sh "$FSDP_BUILD" --find || exit
  exec sh bindings/julia/julia.sh "$FSDP_BUILD" -e 'import FSDP' # which also compiles it
fi
export JULIA_NUM_THREADS=4
exec sh bindings/julia/julia.sh "$FSDP_BUILD" -O0 bindings/julia/conformance.jl "$@"
