"""What a stranger meets on the first day, typed as a user would: in a terminal of 100 x 30 and through pipes, without root.
One class for each habit; their order is that of a day."""
import harness


class FirstDayTest(harness.GtrainTest):
    ordinary_user = True


# ---- live output
# ---- exec and interactive programs
# ---- stalls and stacks
# ---- a second launch of the same job
# ---- nothing vanishes
# ---- times and owners
# ---- a head that restarts or moves
# ---- secrets
# ---- attach
# ---- ranks between min and max
# ---- terminals and colours
# ---- errors once
# ---- plan and logs
# ---- JSON and completion
# ---- a million lines
# ---- the end

if __name__ == '__main__':
    harness.main()
