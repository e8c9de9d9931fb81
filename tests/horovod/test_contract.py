"""The contract's lines on several processes, played again by processes that Horovod joins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract import test_res_ranks
from tests.contract.test_data_ranks import (  # noqa: F401
    test_ddp_a_a_process_without_any_sample_is_named_and_ends_the_job,
    test_ddp_a_all_end_a_pass_together_and_the_log_counts_what_is_left_out,
    test_the_update_is_the_mean_over_all_processes_however_a_share_is_cut,
)
from tests.contract.test_ranks import (  # noqa: F401
    test_data_f_nothing_on_one_rank_is_equal_or_a_clear_error,
    test_ddp_c_opposite_scores_have_one_best_one_stop_and_one_plateau,
    test_ddp_d_a_window_over_two_ranks_is_one_mean,
    test_ddp_e_buffers_are_equal_when_a_test_starts_and_so_is_the_metric,
    test_ddp_f_dropout_differs_by_rank_and_weights_do_not,
    test_ddp_g_the_primary_alone_writes_and_speaks,
    test_ga_e_neither_processes_nor_micro_batches_change_the_training,
    test_met_c_both_report_the_mean_over_both,
)
from tests.contract.test_res_ranks import (  # noqa: F401
    test_res_a_of_three_processes_where_the_order_of_a_sum_shows,
    test_res_a_resumed_is_equal_to_the_bit,
)
from tests.contract.test_res_world import (  # noqa: F401
    killed,
    test_res_l_another_number_goes_on_with_the_same_samples,
    test_res_l_random_states_are_per_rank_and_both_go_on_exactly,
    test_res_m_optimizers_agree_over_ranks_after_a_resume,
    whole,
)
from tests.engine.test_agreement import (  # noqa: F401
    test_a_stop_that_one_process_asks_for,
    test_an_end_of_the_phase_that_one_process_asks_for,
    test_an_optimizer_that_one_process_leaves_out,
    test_an_overflow_on_one_process,
    test_an_update_that_one_process_leaves_out,
    test_not_finite_on_one_process_and_skipped,
    test_not_finite_on_one_process_and_stopped,
)
from tests.engine.test_processes import (  # noqa: F401
    test_every_collective_once,
    test_processes_that_come_apart_are_told_so_by_rank,
    test_who_did_not_come_is_named,
    test_who_has_failed_is_gone_while_another_is_busy,
)


@pytest.fixture(autouse=True, scope="module")
def found_anew() -> Iterator[None]:
    """What was found with ``ddp`` in this session is none of these tests' affair."""
    test_res_ranks.reference.cache_clear()
    yield
    test_res_ranks.reference.cache_clear()
