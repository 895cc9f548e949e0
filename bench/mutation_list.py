"""The rules behind the public cases, each stubbed out in a few words, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass

CASES = (*(f"O-{number:02d}" for number in range(1, 24)), "O-24", "O-25", "O-26", "C5")
"""Every case that has at least one mutation; C5 is: no state without a code and a sentence."""

HOLDFAST = "layers/holdfast/holdfast/"
AGENT, TRAINER = "training_image/agent/", "training_image/trainer/"
MACHINE = "statemachines/run_attempt.asl.json"


@dataclass(frozen=True)
class Mutation:
    """In `file`, `new` stands in place of `old`, which occurs once; then each of `tests` fails."""

    case: str
    stubs: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.case} {self.stubs}"


def _tests(path: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{path}.py::test_{name}" for name in names)


NOTICES, LAUNCH, OPERATIONS = "application/test_notices", "application/test_launch", "application/test_operations"
WARNINGS, SUBMISSION, DOOR = "functions/test_on_warnings", "messages/test_submission", "functions/test_submission"
STORE, ACCEPT = "adapters/test_job_store_contract", "functions/test_accept_request"
STORAGE, ORDERED = "training_image/agent/test_slow_storage", "training_image/trainer/test_orders"
CANCEL, SHAPE, PAGES = "application/test_cancel", "statemachines/test_run_attempt_shape", "functions/test_sweep_pages"

MUTATIONS: tuple[Mutation, ...] = (
    # -- O-01 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-01", "a machine of nobody is our fault",
        HOLDFAST + "application/notices.py",
        "        return Told(instance=instance, fate=Fate.FOREIGN)\n    return node_interrupted(",
        "        raise UnknownJob(instance)\n    return node_interrupted(",
        _tests(NOTICES, "o01_notices_for_machines_that_are_not_ours_touch_nothing_however_often")
        + _tests(WARNINGS, "o01_a_thousand_foreign_warnings_are_counted_and_do_not_delay_ours"),
    ),
    Mutation(
        "O-01", "foreign machines are not counted",
        HOLDFAST + "runtime/observability.py",
        'COUNTED = {Fate.FOREIGN: "ForeignInstance", Fate.LATE: "LateNotice"}',
        'COUNTED = {Fate.LATE: "LateNotice"}',
        _tests(WARNINGS, "o01_a_thousand_foreign_warnings_are_counted_and_do_not_delay_ours"),
    ),
    Mutation(
        "O-01", "an older attempt's news count",
        HOLDFAST + "domain/transitions.py",
        "        if event.attempt < job.attempt or not job.attempt_open:",
        "        if not job.attempt_open:",
        _tests(NOTICES, "o01_notices_for_an_older_attempt_or_an_ended_job_are_late_and_harmless",
               "o04_a_second_interruption_of_the_old_fleet_does_not_disturb_its_relaunch"),
    ),
    # -- O-02 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-02", "ids are taken as they are written",
        HOLDFAST + "messages/aws_event.py",
        'tail = text.strip().rsplit("/", 1)[-1].lower()',
        "tail = text",
        _tests(WARNINGS, "o02_an_odd_instance_id_is_normalised_or_set_aside_once"),
    ),
    Mutation(
        "O-02", "one bad id spoils its event",
        HOLDFAST + "messages/aws_event.py",
        "            refused.append(refusal)",
        "            raise",
        _tests(WARNINGS, "o02_bad_ids_among_good_ones_spoil_none_of_them"),
    ),
    # -- O-03 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-03", "no cool-down between early saves",
        HOLDFAST + "domain/notices.py",
        "    return job.save_asked_at is not None and now - job.save_asked_at < REBALANCE_COOL_DOWN_S",
        "    return False",
        _tests(NOTICES, "o03_five_pieces_of_advice_in_a_minute_bring_one_save_and_cost_no_node"),
    ),
    Mutation(
        "O-03", "advice holds for ever",
        HOLDFAST + "domain/notices.py",
        "job.advised_until_at is None or now >= job.advised_until_at:",
        "job.advised_until_at is None:",
        _tests(NOTICES, "o03_nine_quiet_hours_after_advice_leave_a_running_job_and_no_trace"),
    ),
    Mutation(
        "O-03", "a warning is heeded only after advice",
        HOLDFAST + "domain/transitions.py",
        "    if event.instance in job.doomed:\n        return job",
        "    if event.instance in job.doomed or job.advised_until_at is None:\n        return job",
        _tests(NOTICES, "o03_a_spot_warning_needs_no_advice_before_it"),
    ),
    # -- O-04 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-04", "the second notice replaces the first",
        HOLDFAST + "domain/transitions.py",
        "doomed=(*job.doomed, *new), deadline_at=deadline_at,",
        "doomed=new, deadline_at=event.deadline_at,",
        _tests(NOTICES, "o04_two_interruptions_are_one_recovery_of_the_whole_gang"),
    ),
    # -- O-05 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-05", "a launch does not look whether it is wanted",
        HOLDFAST + "application/launch.py",
        "        and job.intent is Intent.RUN\n    )",
        "    )",
        _tests(CANCEL, "o05_nothing_is_bought_when_the_cancel_came_before_the_fleet_was_intended"),
    ),
    Mutation(
        "O-05", "a launch with survivors does not either",
        HOLDFAST + "application/survivors.py",
        " and told.phase is Phase.LAUNCHING and told.intent is Intent.RUN",
        " and told.phase is Phase.LAUNCHING",
        _tests(CANCEL, "o05_nothing_is_bought_when_the_cancel_came_before_the_fleet_was_intended"),
    ),
    Mutation(
        "O-05", "a cancelled launch is waited for",
        HOLDFAST + "domain/obligations.py",
        '        answers[Wait.READY] = {"outcome": "withdrawn"}',
        "        pass",
        _tests(CANCEL, "o05_a_cancel_at_any_point_of_a_launch_leaves_no_machine_and_a_cancelled_job"),
    ),
    Mutation(
        "O-05", "what comes after the close stays",
        HOLDFAST + "application/launch.py",
        "            self.ports.store.mark_ending(intent.instances, this.job_id, self.ports.clock())\n"
        "            self.ports.fleets.terminate(intent.instances)\n            raise",
        "            raise",
        _tests(LAUNCH, "a_fleet_that_arrives_after_its_attempt_was_closed_is_ended_at_once"),
    ),
    Mutation(
        "O-05", "a member of a closed attempt is owned",
        HOLDFAST + "domain/ownership.py",
        "    if node.state is Ownership.MEMBER and node.attempt <= closed:",
        "    if False:",
        _tests(CANCEL, "o05_where_the_launch_dies_after_that_what_it_owned_by_then_is_swept"),
    ),
    Mutation(
        "O-05", "a stopped run is not cleared away",
        HOLDFAST + "application/sweep.py",
        '            yield self._close(job, f"execution {status.lower()}")',
        "            return",
        _tests(CANCEL, "o05_where_the_run_is_stopped_too_the_sweep_alone_leaves_no_machine"),
    ),
    # -- O-06 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-06", "not seen is gone",
        HOLDFAST + "application/sweep.py",
        "        seen = {instance.id: instance for instance in self.ports.fleets.described(intent.instances)}\n",
        "        seen = {}\n        try:\n"
        "            seen = {instance.id: instance for instance in self.ports.fleets.described(intent.instances)}\n"
        "        except Exception:\n            pass\n",
        _tests(NOTICES, "o06_a_look_that_fails_is_no_loss_however_often_it_fails"),
    ),
    Mutation(
        "O-06", "a loss that was seen is not believed",
        HOLDFAST + "application/sweep.py",
        "        return instance.live\n",
        "        return True\n",
        _tests(NOTICES, "o06_a_loss_that_was_seen_is_told_once_and_recovered_once"),
    ),
    # -- O-07 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-07", "a bad record is our fault",
        "functions/accept_request.py",
        "    except Rejected as refusal:",
        "    except ZeroDivisionError as refusal:",
        _tests(WARNINGS, "o07_records_that_fail_validation_are_refused_with_a_reason_and_spare_their_batch")
        + _tests(DOOR, "o08_bodies_that_are_no_object_are_all_acknowledged_and_answered",
                 "o26_a_save_of_another_bucket_is_refused_at_the_door"),
    ),
    Mutation(
        "O-07", "one failure sends the whole batch back",
        "functions/accept_request.py",
        "    return process_partial_response(event=event, record_handler=take, processor=processor, context=context)",
        "    answer = process_partial_response(\n"
        "        event=event, record_handler=take, processor=processor, context=context)\n"
        '    back = [{"itemIdentifier": one["messageId"]} for one in event["Records"]]\n'
        '    return {"batchItemFailures": back if answer["batchItemFailures"] else []}',
        _tests(WARNINGS, "o07_a_record_that_fails_by_our_fault_goes_back_alone"),
    ),
    # -- O-08 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-08", "a byte-order mark is text",
        HOLDFAST + "messages/envelope.py",
        r'_parse(body.removeprefix("\ufeff"))',
        "_parse(body)",
        _tests(SUBMISSION, "o08_a_byte_order_mark_is_as_if_it_were_not_there")
        + _tests(DOOR, "o08_bodies_that_are_no_object_are_all_acknowledged_and_answered"),
    ),
    Mutation(
        "O-08", "depth is not caught",
        HOLDFAST + "messages/envelope.py",
        "    except RecursionError as error:",
        "    except ZeroDivisionError as error:",
        _tests(SUBMISSION, "o08_every_byte_string_is_accepted_or_refused_with_a_short_reason"),
    ),
    # -- O-09 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-09", "calls are not counted",
        HOLDFAST + "domain/placement.py",
        "        return now if len(recent) < CALLS_AN_HOUR else recent[-CALLS_AN_HOUR] + HOUR_S",
        "        return now",
        _tests(LAUNCH, "o09_many_candidates_make_no_more_calls_than_stated")
        + _tests("domain/test_placement", "o09_a_job_makes_no_more_than_its_calls_in_any_hour"),
    ),
    Mutation(
        "O-09", "a pool is left alone ever as long",
        HOLDFAST + "domain/placement.py",
        "    grown = base_s * 2.0 ** min(misses - 1, 10)",
        "    grown = base_s",
        _tests("domain/test_placement", "o09_a_pool_is_left_alone_longer_with_each_refusal_in_a_row_up_to_a_limit"),
    ),
    Mutation(
        "O-09", "a job asks again at once",
        HOLDFAST + "application/launch.py",
        "        not_before = ask_again_at(now, this.again_at, this.patience, jitter)",
        "        not_before = now",
        _tests(LAUNCH, "o09_capacity_is_awaited_for_days_without_burning_attempts"),
    ),
    Mutation(
        "O-09", "a door may send to the queue that wakes it",
        "template.yaml",
        "            Action: sqs:SendMessage\n            Resource: !GetAtt ResultQueue.Arn",
        "            Action: sqs:SendMessage\n"
        "            Resource: [!GetAtt ResultQueue.Arn, !GetAtt RequestQueue.Arn]",
        _tests("template/test_permissions", "o09_no_function_can_put_work_back_where_it_wakes_one_of_us"),
    ),
    # -- O-10 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-10", "no limit of the body",
        HOLDFAST + "messages/envelope.py",
        "    if size > BODY_LIMIT_BYTES:",
        "    if False:",
        _tests("messages/test_rules", "o10_a_request_of_900_kib_is_refused_with_the_limit_named")
        + _tests(SUBMISSION, "o08_every_byte_string_is_accepted_or_refused_with_a_short_reason"),
    ),
    Mutation(
        "O-10", "reasons are not cut",
        HOLDFAST + "application/launch.py",
        "REASON_CHARACTERS = 500",
        "REASON_CHARACTERS = 500_000",
        _tests(LAUNCH, "o10_reasons_are_cut_however_many_candidates_were_refused"),
    ),
    Mutation(
        "O-10", "details of the history are not cut",
        HOLDFAST + "adapters/job_table.py",
        "DETAIL_CHARACTERS = 2_000",
        "DETAIL_CHARACTERS = 200_000",
        _tests(STORE, "o10_no_item_of_the_history_grows_with_the_gang_or_the_log"),
    ),
    Mutation(
        "O-10", "the key of an event names every machine",
        HOLDFAST + "domain/keys.py",
        "KEY_CHARACTERS = 200",
        "KEY_CHARACTERS = 200_000",
        _tests(STORE, "o10_a_dedup_key_fits_a_sort_key_and_still_tells_gangs_apart"),
    ),
    Mutation(
        "O-10", "a step returns its machines",
        HOLDFAST + "application/launch.py",
        '    return {"outcome": outcome, "ready_wait_s": READY_WAIT_S}',
        '    gang = [f"i-{number:017x}" for number in range(256)]\n'
        '    return {"outcome": outcome, "ready_wait_s": READY_WAIT_S, "gang": gang}',
        _tests(LAUNCH, "o10_what_the_step_returns_and_writes_does_not_grow_with_the_fleet")
        + _tests(OPERATIONS, "o10_what_a_state_of_the_run_machine_gets_and_gives_is_under_1_kb_whatever_the_gang"),
    ),
    Mutation(
        "O-10", "every way to end is counted by attempt",
        HOLDFAST + "domain/transitions.py",
        "    if job.failure is not None:\n        # What a node",
        "    charged[str(job.attempt)] = 1\n    if job.failure is not None:\n        # What a node",
        _tests(STORE, "o10_a_job_with_1000_interruptions_has_a_row_as_small_as_with_one"),
    ),
    Mutation(
        "O-10", "the row keeps a record of each machine",
        HOLDFAST + "adapters/job_table.py",
        '    row = {**key_of(f"JOB#{job.id}", "ROW"), **plain(job)}',
        '    row = {**key_of(f"JOB#{job.id}", "ROW"), **plain(job), "members": dict.fromkeys(job.held, job.charged)}',
        _tests(STORE, "o10_a_row_of_256_nodes_all_held_and_all_under_notice_is_under_16_kb"),
    ),
    # -- O-11 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-11", "floats go to the table as they are",
        HOLDFAST + "adapters/items.py",
        "parse_float=_held)",
        "parse_float=float)",
        _tests(SUBMISSION, "o11_ordinary_decimals_reach_table_and_trainer_with_the_same_value")
        + _tests(STORE, "o11_ordinary_decimals_of_a_progress_report_come_back_as_they_were")
        + _tests(DOOR, "o11_the_row_holds_a_budget_of_30_40"),
    ),
    Mutation(
        "O-11", "numbers are not bounded at the table",
        HOLDFAST + "adapters/items.py",
        "parse_float=_held)",
        "parse_float=Decimal)",
        _tests(STORE, "o11_a_bad_loss_that_the_table_cannot_hold_is_kept_as_the_nearest_that_it_can"),
    ),
    Mutation(
        "O-11", "numbers are not bounded at the door",
        HOLDFAST + "messages/job_request.py",
        "        if isinstance(value, float) and value and not",
        "        if value is None and not",
        _tests(SUBMISSION, "o11_a_number_that_the_table_cannot_hold_is_refused_by_name"),
    ),
    Mutation(
        "O-11", "any number will do",
        HOLDFAST + "messages/job_request.py",
        'extra="forbid", strict=True, frozen=True, allow_inf_nan=False)\n\n    @field_validator("*")\n',
        'extra="forbid", strict=False, frozen=True, allow_inf_nan=True)\n\n',
        _tests(SUBMISSION, "o11_numbers_that_cannot_be_kept_exactly_are_refused_by_name"),
    ),
    Mutation(
        "O-11", "a refusal does not name the field",
        HOLDFAST + "messages/refusal.py",
        'f"{_dotted(where)} is {shown}; expected',
        'f"a value is {shown}; expected',
        _tests(SUBMISSION, "o11_a_number_beyond_a_double_is_refused_by_name"),
    ),
    Mutation(
        "O-11", "NaN goes on to the table",
        HOLDFAST + "application/node_reports.py",
        "    return value if value is not None and math.isfinite(value) else None",
        "    return value",
        _tests("application/test_application", "o11_a_loss_that_is_no_number_is_left_out_and_its_report_is_taken"),
    ),
    # -- O-12 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-12", "each call has a token of its own",
        HOLDFAST + "adapters/fleets_ec2.py",
        '            "ClientToken": hashlib.sha256(f"{self.stack}/{purchase.fleet}".encode()).hexdigest()[:64],',
        '            "ClientToken": hashlib.sha256(__import__("os").urandom(9)).hexdigest()[:64],',
        _tests("adapters/test_fleets_ec2", "o12_the_same_purchase_has_the_same_token_and_another_fleet_another"),
    ),
    Mutation(
        "O-12", "nobody looks what the tag shows",
        HOLDFAST + "application/launch.py",
        "        live = [] if fresh else self._shown(intent.fleet)",
        "        live: list[Instance] = []",
        _tests(LAUNCH, "o12_a_launch_that_died_after_the_purchase_adopts_what_it_bought"),
    ),
    Mutation(
        "O-12", "a call that was not answered is not repeated",
        HOLDFAST + "application/launch.py",
        "        if purchase is not None and len(live) < purchase.nodes:",
        "        if fresh and purchase is not None:",
        _tests(LAUNCH, "o12_where_the_tag_is_not_seen_yet_the_same_token_brings_the_same_machines"),
    ),
    Mutation(
        "O-12", "an open purchase is given up",
        HOLDFAST + "application/launch.py",
        "        if intent.closed_at is None:\n            self._settle(intent, this, fresh=False)",
        "        return",
        _tests(LAUNCH, "o12_the_retry_repeats_the_purchase_to_the_letter_whatever_is_cold_by_then"),
    ),
    # -- O-13 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-13", "executions have names of their own",
        HOLDFAST + "adapters/workflow_sfn.py",
        '                name=f"{job_id}-{attempt}",',
        '                name=f"{job_id}-{attempt}-{id(self)}",',
        _tests("adapters/test_workflow_sfn", "o13_a_start_that_is_repeated_while_it_runs_is_the_same_start"),
    ),
    Mutation(
        "O-13", "a used name is taken for a start",
        HOLDFAST + "adapters/workflow_sfn.py",
        '            if status != "RUNNING":',
        "            if status is None:",
        _tests("adapters/test_workflow_sfn", "o13_a_name_that_was_used_up_is_told_and_starts_nothing_else"),
    ),
    Mutation(
        "O-13", "a changed body is the same request",
        HOLDFAST + "application/intake.py",
        '    if known["body_sha256"] != request["body_sha256"]:',
        "    if False:",
        _tests(ACCEPT, "o13_a_changed_body_under_a_used_dedup_id_is_refused_by_its_name"),
    ),
    Mutation(
        "O-13", "a row is written over",
        HOLDFAST + "adapters/job_table.py",
        "            self._put(self.jobs, {**row_of(job), TELLS: True}, new=True),",
        "            self._put(self.jobs, {**row_of(job), TELLS: True}),",
        _tests(ACCEPT, "o13_two_first_deliveries_at_once_have_one_winner")
        + _tests(STORE, "a_request_is_created_once"),
    ),
    Mutation(
        "O-13", "an older execution may close the newer attempt",
        HOLDFAST + "application/release.py",
        "    if job is None or job.attempt != attempt or not job.attempt_open:\n        return\n    record(",
        "    if job is None or not job.attempt_open:\n        return\n    attempt = job.attempt\n    record(",
        _tests("functions/test_on_aws_events", "o13_the_late_failure_of_a_first_execution_overwrites_nothing"),
    ),
    Mutation(
        "O-13", "each delivery is a request of its own",
        HOLDFAST + "messages/job_request.py",
        '    return hashlib.sha256(canonical_json({"team": request.team, "dedup_id": request.dedup_id})).hexdigest()',
        '    return hashlib.sha256(__import__("os").urandom(9)).hexdigest()',
        _tests(ACCEPT, "o13_a_request_delivered_again_and_again_is_one_job_and_one_execution"),
    ),
    # -- O-14 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-14", "the run polls",
        MACHINE,
        '"StringEquals": "interrupted", "Next": "Await checkpoint"}],',
        '"StringEquals": "interrupted", "Next": "Await checkpoint"}, '
        '{"Variable": "$.watch.outcome", "StringEquals": "running", "Next": "Watch training"}],',
        _tests(SHAPE, "o14_an_execution_never_polls_so_its_history_does_not_grow_with_the_jobs_length"),
    ),
    Mutation(
        "O-14", "the run ends after a fortnight",
        MACHINE,
        '"TimeoutSeconds": 31536000',
        '"TimeoutSeconds": 1209600',
        _tests(SHAPE, "o14_a_run_may_last_as_long_as_any_job_may_train"),
    ),
    Mutation(
        "O-14", "a launch goes round without a call",
        HOLDFAST + "application/launch.py",
        "        if now > this.ends_at - CALL_RESERVE_S:",
        "        if now > this.ends_at - 2 * CALL_RESERVE_S - 1:",
        _tests(LAUNCH, "o14_a_launch_whose_time_runs_out_makes_a_call_each_turn_and_then_waits_elsewhere"),
    ),
    Mutation(
        "O-14", "a start that was lost is not made good",
        HOLDFAST + "application/sweep.py",
        "            self.ports.workflow.start(job.id, job.attempt)",
        "            pass",
        _tests(OPERATIONS, "o14_a_job_of_14_days_with_40_interruptions_is_41_executions_and_loses_nothing"),
    ),
    # -- O-15 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-15", "training is watched without a heartbeat",
        MACHINE,
        '"wait": "training", "token.$": "$$.Task.Token"}},\n      "TimeoutSecondsPath": "$.ready.run_s",\n'
        '      "HeartbeatSecondsPath": "$.ready.heartbeat_s",',
        '"wait": "training", "token.$": "$$.Task.Token"}},\n      "TimeoutSecondsPath": "$.ready.run_s",',
        _tests(SHAPE, "o15_a_wait_has_a_deadline_and_where_agents_are_at_work_a_heartbeat")
        + _tests("functions/test_long_waits",
                 "o15_a_fleet_that_falls_silent_after_an_hour_is_given_back_within_two_minutes"),
    ),
    Mutation(
        "O-15", "nodes are awaited for ever",
        MACHINE,
        '      "TimeoutSecondsPath": "$.fleet.answer.ready_wait_s",\n',
        "",
        _tests(SHAPE, "o15_a_wait_has_a_deadline_and_where_agents_are_at_work_a_heartbeat"),
    ),
    Mutation(
        "O-15", "nodes are awaited for a day",
        HOLDFAST + "application/launch.py",
        "READY_WAIT_S = 900",
        "READY_WAIT_S = 86_400",
        _tests("functions/test_long_waits",
               "o15_a_fleet_that_never_speaks_is_given_back_at_its_deadline_and_another_is_bought"),
    ),
    Mutation(
        "O-15", "five minutes of silence are no silence",
        HOLDFAST + "domain/obligations.py",
        "HEARTBEAT_S = 30",
        "HEARTBEAT_S = 300",
        _tests(SHAPE, "o15_two_silences_are_noticed_within_a_notice_and_other_waits_are_short"),
    ),
    Mutation(
        "O-15", "silence is not measured",
        HOLDFAST + "application/vitals.py",
        '            self._one_more("SilentFleets")',
        "            pass",
        _tests(OPERATIONS, "o15_a_fleet_of_which_no_node_checks_in_is_measured_as_silent",
               "o15_a_training_fleet_that_stops_reporting_is_measured_as_silent"),
    ),
    # -- O-16 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-16", "only the first element is read",
        HOLDFAST + "adapters/fleets_ec2.py",
        'for group in answer.get("Instances", [])),',
        'for group in answer.get("Instances", [])[:1]),',
        _tests("adapters/test_fleets_ec2", "o16_every_id_of_every_element_is_in_the_answer"),
    ),
    Mutation(
        "O-16", "types are mixed",
        HOLDFAST + "domain/purchase.py",
        "        groups.setdefault((part.instance_type, part.zone), []).extend(part.instances)",
        "        groups.setdefault((purchase.instance_type, part.zone), []).extend(part.instances)",
        _tests("domain/test_purchase", "o16_eight_machines_of_two_types_are_no_gang_of_eight",
               "o16_a_job_that_goes_on_with_fewer_keeps_the_largest_set_of_one_type_and_gives_back_the_rest")
        + _tests(LAUNCH,
                 "o16_a_job_that_goes_on_with_fewer_starts_with_them_after_every_whole_gang_was_refused"),
    ),
    Mutation(
        "O-16", "a part is dropped and not given back",
        HOLDFAST + "application/launch.py",
        "        if bought.instances:\n            self.ports.store.close_intent(noted)",
        "        noted = replace(intent, outcome=reason)",
        _tests(LAUNCH, "o16_a_part_of_a_gang_is_written_down_then_ended_and_a_crash_between_is_repaired",
               "o16_where_no_run_comes_back_the_release_ends_what_the_intent_lists"),
    ),
    Mutation(
        "O-16", "a part that lives on is forgotten",
        HOLDFAST + "application/launch.py",
        "            if not ended.issuperset(intent.instances):",
        "            if False:",
        _tests(LAUNCH, "o16_no_other_call_is_made_while_a_part_still_lives"),
    ),
    Mutation(
        "O-16", "the release passes over what EC2 does not show yet",
        HOLDFAST + "application/release.py",
        "    hidden = named - seen.keys() if intent and intent.may_still_show(ports.clock()) else set()",
        "    hidden: set[str] = set()",
        _tests(LAUNCH, "o16_a_part_that_ec2_does_not_show_yet_is_ended_by_the_release"),
    ),
    Mutation(
        "O-16", "only one element counts",
        HOLDFAST + "domain/purchase.py",
        "        return tuple(dict.fromkeys(instance for part in self.parts for instance in part.instances))",
        "        return tuple(dict.fromkeys(instance for part in self.parts[:1] for instance in part.instances))",
        _tests("domain/test_purchase", "o16_every_id_of_every_element_counts"),
    ),
    # -- O-17 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-17", "some are ended before all are judged",
        HOLDFAST + "application/sweep.py",
        "        found = [(instance, why_orphan(instance)) for instance in listed]",
        "        found = ((instance, why_orphan(instance)) for instance in listed)",
        _tests(PAGES, "o17_with_a_page_that_never_comes_nothing_is_ended_and_the_sweep_is_told_as_failed"),
    ),
    Mutation(
        "O-17", "only the first page of machines is read",
        HOLDFAST + "adapters/fleets_ec2.py",
        '        pages = self.client.get_paginator("describe_instances").paginate(Filters=filters)',
        "        pages = [self.client.describe_instances(Filters=filters)]",
        _tests(PAGES, "o17_among_250_machines_on_many_pages_only_the_orphan_is_ended"),
    ),
    Mutation(
        "O-17", "only the first page of jobs is read",
        HOLDFAST + "adapters/tables.py",
        '        return [from_item(item) for page in pages for item in page["Items"]]',
        '        return [from_item(item) for page in list(pages)[:1] for item in page["Items"]]',
        _tests(PAGES, "o17_among_250_machines_on_many_pages_only_the_orphan_is_ended"),
    ),
    # -- O-18 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-18", "a group in use is an error",
        HOLDFAST + "adapters/placement_groups_ec2.py",
        "            if code_of(error) in GROUP_IN_USE:\n                return False",
        "            if code_of(error) in GROUP_IN_USE:\n                raise",
        _tests("adapters/test_launch_templates_ec2", "o18_a_group_in_use_is_no_error_and_one_that_is_gone_is_gone"),
    ),
    Mutation(
        "O-18", "nobody tries again",
        HOLDFAST + "application/sweep.py",
        "            self._add(self._leftovers())",
        "            pass",
        _tests("application/test_readiness",
               "o18_a_group_in_use_never_holds_up_a_finished_job_and_is_never_forgotten"),
    ),
    Mutation(
        "O-18", "the group of a job that lives is deleted",
        HOLDFAST + "application/retire.py",
        "        if job is not None and not job.over:",
        "        if False:",
        _tests("application/test_readiness", "o18_the_group_of_a_job_that_waits_is_kept_and_that_of_nobody_is_not"),
    ),
    # -- O-19 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-19", "names go into names as they are",
        HOLDFAST + "messages/job_request.py",
        '    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:room].strip("-")',
        "    slug = request.name",
        _tests(SUBMISSION, "o19_an_accepted_name_is_shown_as_it_is_and_every_derived_name_is_legal"),
    ),
    Mutation(
        "O-19", "a name alone makes the job's id",
        HOLDFAST + "messages/job_request.py",
        """    return f"{slug or 'job'}-{request_identity(request)[:IDENTITY_CHARACTERS]}\"""",
        """    return f"{slug or 'job'}-0123456789\"""",
        _tests(SUBMISSION, "o19_different_jobs_never_share_a_derived_name")
        + _tests(DOOR, "o19_two_names_that_clean_to_one_are_two_jobs"),
    ),
    Mutation(
        "O-19", "every name is a name",
        HOLDFAST + "messages/job_request.py",
        "    name: Annotated[str, AfterValidator(printable), AfterValidator(_plain_name)] = Field(",
        "    name: str = Field(",
        _tests(SUBMISSION, "o19_any_other_name_is_refused_at_submit_with_the_rule"),
    ),
    # -- O-20 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-20", "files are said to be there before they are",
        AGENT + "saves.py",
        "                self._bucket.upload(path, key)\n",
        "                self._bucket.keys(key)\n",
        _tests(STORAGE, "o20_files_then_parts_then_manifest_then_head",
               "o20_a_save_that_dies_on_its_way_leaves_the_head_at_the_save_before_and_nothing_is_deleted_for_it"),
    ),
    # -- O-21 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-21", "an upload is tried once",
        AGENT + "saves.py",
        "                if permanent(error) or self._clock() >= give_up_at or self.loop.closed.is_set():",
        "                if True:",
        _tests(STORAGE, "o21_a_throttled_upload_is_tried_again_and_the_save_is_committed"),
    ),
    Mutation(
        "O-21", "a failed part is no end",
        AGENT + "saves.py",
        "            broken = next((part for part in parts if part.failed), None)",
        "            broken = None",
        _tests(STORAGE, "o21_storage_that_fails_for_good_on_one_node_ends_the_save_on_all_and_the_training_goes_on"),
    ),
    Mutation(
        "O-21", "the error code is kept back",
        AGENT + "saves.py",
        '                    raise NotUploaded(f"{code} at {name}") from error',
        '                    raise NotUploaded("no luck") from error',
        _tests(STORAGE, "o21_storage_that_fails_for_good_on_one_node_ends_the_save_on_all_and_the_training_goes_on",
               "o21_a_forced_save_that_is_refused_fails_the_attempt_with_the_error_code"),
    ),
    Mutation(
        "O-21", "a rank that cannot write tells nobody",
        TRAINER + "checkpoint.py",
        "            self._describe(name, facts, generation, failed=causes)\n",
        "            del causes\n",
        _tests(ORDERED, "o21_a_rank_that_cannot_write_ends_the_save_on_all_ranks_and_the_training_goes_on"),
    ),
    Mutation(
        "O-21", "a lost save leaves no trace in the job",
        HOLDFAST + "domain/transitions.py",
        "    return replace(job, phase=target, lost_saves=job.lost_saves + 1)",
        "    return job",
        _tests(OPERATIONS, "o21_a_save_that_was_lost_stands_in_the_jobs_history_once_with_node_and_error_code"),
    ),
    # -- O-24 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-24", "the training waits for its saves",
        TRAINER + "checkpoint.py",
        "        if self.stager is None:\n            return self.write(",
        "        if True:\n            return self.write(",
        _tests(ORDERED, "o24_an_order_while_a_save_is_written_and_a_second_one_right_after_it_make_one_more_save"),
    ),
    Mutation(
        "O-24", "a save of no step is published",
        TRAINER + "train.py",
        "    if existing or not run.step or run.non_finite_steps:",
        "    if existing or run.non_finite_steps:",
        _tests(ORDERED, "o24_an_order_before_the_first_step_of_a_new_job_ends_it_cleanly_and_publishes_no_save"),
    ),
    Mutation(
        "O-24", "an order is answered as another one",
        TRAINER + "control.py",
        "        return Order(generation=value // len(KINDS),",
        "        return Order(generation=value // len(KINDS) + 1,",
        _tests(ORDERED,
               "o24_an_order_that_one_node_sees_is_obeyed_by_all_at_one_step_in_the_middle_of_accumulation"),
    ),
    Mutation(
        "O-24", "an order that comes while weights are fetched is forgotten",
        TRAINER + "train.py",
        "            raise OrderedMeanwhile(order)",
        "            raise OrderedMeanwhile",
        _tests(ORDERED, "o24_ranks_that_wait_for_weights_answer_a_checkpoint_and_a_stop_and_publish_no_save"),
    ),
    Mutation(
        "O-24", "nobody notes when an order came",
        AGENT + "saves.py",
        "            self._ordered_at.setdefault(control.generation, self._clock())",
        "            pass",
        _tests(STORAGE, "o24_the_time_from_an_order_to_the_commit_of_its_save_is_reported"),
    ),
    # -- O-25 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-25", "variables may have any name",
        HOLDFAST + "messages/variables.py",
        "        if not NAME.fullmatch(name):",
        "        if False:",
        _tests(SUBMISSION, "o25_a_name_team_type_zone_image_or_variable_name_like_a_command_is_refused"),
    ),
    Mutation(
        "O-25", "the loader's variables may be set",
        HOLDFAST + "messages/variables.py",
        "        if upper in RESERVED or upper.startswith(RESERVED_PREFIXES):",
        "        if False:",
        _tests(SUBMISSION, "o25_variables_that_steer_loader_ranks_or_credentials_are_refused"),
    ),
    Mutation(
        "O-25", "arguments are taken apart into words",
        HOLDFAST + "messages/job_request.py",
        "command=request.image.command",
        'command=tuple(" ".join(request.image.command).split())',
        _tests(SUBMISSION, "o25_an_argument_or_a_variable_stays_one_text_to_the_letter"),
    ),
    Mutation(
        "O-25", "the agent takes arguments apart into words",
        "training_image/agent/ranks.py",
        "                [*launcher, *command, str(run_dir)],",
        '                [*launcher, *" ".join(command).split(), str(run_dir)],',
        _tests("training_image/agent/test_variables", "o25_an_argument_and_a_variable_reach_the_rank_as_one_text"),
    ),
    Mutation(
        "O-25", "the boot script does not quote the image",
        "template.yaml",
        '              docker pull "$image" && break',
        '              eval "docker pull $image" && break',
        _tests("template/test_boot_script", "o25_whatever_the_tag_of_the_image_says_reaches_docker_as_one_argument"),
    ),
    # -- O-26 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-26", "a key may walk up",
        HOLDFAST + "domain/locations.py",
        ' or {"", ".", ".."} & set(parts):',
        ":",
        _tests(SUBMISSION, "o26_an_address_that_leaves_the_teams_part_is_refused_at_submit",
               "o26_the_one_shared_check_refuses_it_too", "o26_a_reference_is_written_plainly"),
    ),
    Mutation(
        "O-26", "nobody has a part of the bucket",
        HOLDFAST + "domain/locations.py",
        '    own = f"teams/{team}/"',
        '    own = f"{team}/"',
        _tests(SUBMISSION, "o26_an_address_inside_the_teams_part_is_its_own_key"),
    ),
    Mutation(
        "O-26", "the key may be another team's",
        HOLDFAST + "domain/locations.py",
        "    if not key.startswith(own):",
        "    if False:",
        _tests(SUBMISSION, "o26_the_one_shared_check_refuses_it_too"),
    ),
    Mutation(
        "O-26", "the bucket may be any",
        HOLDFAST + "domain/locations.py",
        "    if bucket is not None and named != bucket:",
        "    if False:",
        _tests(SUBMISSION, "o26_the_one_shared_check_refuses_it_too")
        + _tests(DOOR, "o26_a_save_of_another_bucket_is_refused_at_the_door"),
    ),
    Mutation(
        "O-26", "the bucket's owner is not asked for",
        HOLDFAST + "adapters/request_files_s3.py",
        '        owner = {"ExpectedBucketOwner": self.owner} if self.owner else {}',
        "        owner: dict[str, str] = {}",
        _tests("adapters/test_catalogue_ec2", "o26_the_call_names_the_account_that_must_own_the_bucket"),
    ),
    Mutation(
        "O-26", "a foreign bucket is asked again and again",
        HOLDFAST + "adapters/request_files_s3.py",
        "            if code_of(error) in ACCESS_DENIED or status_of(error) == 403:",
        "            if False:",
        _tests("adapters/test_catalogue_ec2", "o26_a_bucket_of_another_account_is_refused_and_not_retried"),
    ),
    Mutation(
        "O-26", "a dataset may be another team's",
        HOLDFAST + "domain/locations.py",
        "    if named == bucket and team is not None and parts[1] != team:",
        "    if False:",
        _tests("application/test_datasets", "o26_a_dataset_lies_plainly_inside_what_its_team_may_read"),
    ),
    # -- O-22 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-22", "the ranks' shares overlap where the batch does not divide",
        "training_image/trainer/data.py",
        "        self.first = rank * share + min(rank, more)",
        "        self.first = rank * share",
        _tests("training_image/trainer/test_data_order",
               "o22_a_resume_on_another_number_of_ranks_leaves_no_gap_and_repeats_nothing"),
    ),
    Mutation(
        "O-22", "a resumed training leaves a global batch out",
        "training_image/trainer/train.py",
        '    run.step, run.loss = restored.facts["step"], restored.facts["last_loss"]',
        '    run.step, run.loss = restored.facts["step"] + 1, restored.facts["last_loss"]',
        _tests("training_image/trainer/test_exact_resume",
               "o22_a_save_of_two_ranks_resumes_on_fewer_and_on_more_without_a_gap_or_a_repeat"),
    ),
    # -- O-23 ----------------------------------------------------------------------------------------------------------
    Mutation(
        "O-23", "a resumed optimizer counts its steps anew",
        "training_image/trainer/train.py",
        "    run.learner.set_step(run.step)",
        "    run.learner.set_step(0)",
        _tests("training_image/trainer/test_exact_resume",
               "o23_a_killed_training_has_the_rates_moments_and_counters_of_one_that_was_not"),
    ),
    # -- C5 ------------------------------------------------------------------------------------------------------------
    Mutation(
        "C5", "a job that waits for its machines says nothing",
        HOLDFAST + "domain/transitions.py",
        '        stage="starting the run",',
        '        stage="",',
        _tests("application/test_exploration", "every_order_of_an_undisturbed_job_ends_well"),
    ),
    Mutation(
        "C5", "a job without room in its quota waits for no reason",
        HOLDFAST + "domain/queueing.py",
        "        self.because[waiter.id] = self._reason(waiter, lacking, stopped_by)",
        "        pass",
        _tests("domain/test_queueing", "every_job_is_started_or_told_why_not_whatever_order_they_come_in"),
    ),
)  # fmt: skip
