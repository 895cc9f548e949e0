"""Free room over time, against a count second by second."""

from __future__ import annotations

import random

from holdfast.domain.room import FOR_EVER, Room


def test_room_is_what_a_count_second_by_second_says() -> None:
    dice = random.Random(7)
    for _ in range(300):
        ends = [(float(dice.randint(1, 20)), dice.randint(1, 5)) for _ in range(dice.randint(0, 6))]
        room = Room(20, now=0.0, ends=ends)
        taken = []
        for _ in range(dice.randint(0, 4)):
            start = dice.randint(0, 15)
            taken.append((dice.randint(0, 4), start, start + dice.randint(0, 10)))
            room.take(taken[-1][0], float(taken[-1][1]), float(taken[-1][2]))
        free = [
            20 - sum(amount for at, amount in ends if at > second) - sum(a for a, s, e in taken if s <= second < e)
            for second in range(60)
        ]
        assert room.now == free[0]
        for _ in range(20):
            start = dice.randint(0, 25)
            end = start + dice.randint(1, 20)
            assert room.lowest(float(start), float(end)) == min(free[start:end])
            amount, length = dice.randint(1, 22), dice.randint(1, 20)
            counted = (at for at in range(start, 60 - length) if min(free[at : at + length]) >= amount)
            assert room.earliest(amount, float(length), float(start)) == next(counted, FOR_EVER)
