#!/bin/sh
# Counts to $TO, a tenth of a second each. Knows of Sublet only that a file appears when it has to leave.
state="$SUBLET_CHECKPOINT_DIR/count"
n=$(cat "$state" 2>/dev/null || echo 0)
[ "$n" -gt 0 ] && echo "goes on from $n"

save() { echo "$n" > "$state.new" && sync "$state.new" && mv "$state.new" "$state"; }

while [ "$n" -lt "${TO:-600}" ]; do
    n=$((n + 1))
    sleep 0.1
    [ $((n % 50)) -eq 0 ] && save && echo "counted to $n"
    if [ -e "$SUBLET_NOTICE_FILE" ]; then
        save
        echo "saved at $n, leaving"
        exit 85
    fi
done
echo "done at $n"
