# Sourced by the worked examples, which set `out`, and pass their own flags on to every stage.
# NPROC, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT in the environment say where the processes run.
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
flags=("$@")
where=(--nproc "$NPROC" --nnodes "${NNODES:-1}" --node_rank "${NODE_RANK:-0}")
where+=(--master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "${MASTER_PORT:-29500}")

stage() { bash "$scripts/$1.sh" "${@:2}" "${where[@]}" ${flags[@]+"${flags[@]}"}; }

# made FOLDER MODEL: the folder that an earlier stage makes; in a dry run it is not there yet, and its start stands in.
made() {
  if [[ " ${flags[*]-} " == *" --dry_run "* && ! -e "$1" ]]; then echo "$2"; else echo "$1"; fi
}
