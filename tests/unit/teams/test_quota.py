from __future__ import annotations

from pathlib import Path

import pytest

from serving.teams.database import Database, open_database
from serving.teams.errors import StoreError
from serving.teams.quota import TIMELESS, Charge, charge_name
from serving.teams.quota_store import SqlQuotaStore
from serving.teams.windows import RULES

DAY = 1_767_312_000.0


def test_a_new_store_is_empty(database: Database) -> None:
    assert SqlQuotaStore(database).load() == {}


def test_what_was_saved_is_loaded_by_the_next_bank(database: Database) -> None:
    charges = {
        charge_name("team:search", "tokens_per_day"): Charge(DAY, 3_000_000_000),
        charge_name("key:abcd1234", "requests_per_minute"): Charge(TIMELESS, 7),
    }
    SqlQuotaStore(database).save(charges)
    assert SqlQuotaStore(database).load() == charges


def test_a_later_figure_takes_the_place_of_the_earlier_and_leaves_others(
    database: Database,
) -> None:
    store = SqlQuotaStore(database)
    store.save({"team:a/tokens_per_day": Charge(DAY, 5), "team:b/tokens_per_day": Charge(DAY, 6)})
    store.save({"team:a/tokens_per_day": Charge(DAY + 86_400, 1)})
    assert store.load() == {
        "team:a/tokens_per_day": Charge(DAY + 86_400, 1),
        "team:b/tokens_per_day": Charge(DAY, 6),
    }


def test_what_is_used_no_more_is_forgotten(database: Database) -> None:
    store = SqlQuotaStore(database)
    store.save({"team:a/concurrent_requests": Charge(TIMELESS, 5)})
    store.save({"team:a/concurrent_requests": Charge(TIMELESS, 0)})
    assert store.load() == {}


def test_to_save_nothing_changes_nothing(database: Database) -> None:
    store = SqlQuotaStore(database)
    store.save({"team:a/tokens_per_day": Charge(DAY, 5)})
    store.save({})
    assert store.load() == {"team:a/tokens_per_day": Charge(DAY, 5)}


def test_the_longest_names_fit(database: Database) -> None:
    names = [charge_name(f"team:{'t' * 64}", rule.limit) for rule in RULES]
    store = SqlQuotaStore(database)
    store.save({name: Charge(DAY, 1) for name in names})
    assert set(store.load()) == set(names)


def test_a_store_without_tables_says_so(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'empty.db'}")
    with pytest.raises(StoreError, match="no such table: quotas"):
        SqlQuotaStore(database).load()
    database.close()
