//! Tests of the operations on the state.

use super::*;
use crate::model::{TXN_BYTES_MAX, TXN_OPS_MAX};
use proptest::prelude::*;

const TTL: Duration = Duration::from_secs(5);

fn put(key: &str, value: &str) -> Op {
    put_under(key, value, None)
}

fn put_under(key: &str, value: &str, lease: Option<Lease>) -> Op {
    Op::Put { key: key.to_owned(), value: value.into(), lease }
}

fn delete(key: &str) -> Op {
    Op::Delete { key: key.to_owned() }
}

fn always(then: Vec<Op>) -> Txn {
    Txn { when: Vec::new(), then }
}

/// Executes operations that must succeed; returns the revision.
fn done(state: &mut State, then: Vec<Op>) -> u64 {
    let outcome = state.txn(always(then)).unwrap();
    assert!(outcome.succeeded);
    outcome.revision
}

fn keys(state: &State, prefix: &str) -> Vec<String> {
    state.range(&prefix.into()).entries.into_iter().map(|entry| entry.key).collect()
}

#[test]
fn a_revision_counts_changes_and_not_requests() {
    let mut state = State::default();
    assert_eq!(done(&mut state, vec![put("a", "1"), put("b", "1")]), 1, "together, at one revision");
    assert_eq!(done(&mut state, vec![put("a", "1")]), 2, "the same value is a change, as in etcd");
    assert_eq!(done(&mut state, vec![delete("nothing")]), 2);
    assert_eq!(done(&mut state, vec![]), 2);
    let entry = state.get("a").unwrap();
    assert_eq!((entry.create_revision, entry.mod_revision), (1, 2));
    done(&mut state, vec![delete("a")]);
    done(&mut state, vec![put("a", "2")]);
    assert_eq!(state.get("a").map(|entry| entry.create_revision), Some(4), "it was created again");
}

#[test]
fn a_transaction_whose_guard_fails_does_nothing() {
    let check = |compare: Compare, holds: bool| {
        let mut state = State::default();
        done(&mut state, vec![put("a", "1")]);
        done(&mut state, vec![put("a", "2")]);
        let outcome = state.txn(Txn { when: vec![compare.clone()], then: vec![put("b", "!")] }).unwrap();
        assert_eq!((outcome.succeeded, state.get("b").is_some()), (holds, holds), "{compare:?}");
        assert_eq!(outcome.revision, if holds { 3 } else { 2 });
    };
    check(Compare::CreateRevision("a".into(), 1), true);
    check(Compare::CreateRevision("a".into(), 2), false);
    check(Compare::CreateRevision("a".into(), 0), false);
    check(Compare::CreateRevision("new".into(), 0), true);
    check(Compare::ModRevision("a".into(), 2), true);
    check(Compare::ModRevision("a".into(), 1), false);
    check(Compare::ModRevision("new".into(), 0), true);
    check(Compare::ModRevision("new".into(), 1), false);
}

#[test]
fn a_prefix_is_listed_in_order_without_other_keys() {
    let mut state = State::default();
    done(&mut state, ["spokes/b", "spokes/a", "spokes", "spokesman", "t"].map(|key| put(key, "")).to_vec());
    assert_eq!(keys(&state, "spokes/"), ["spokes/a", "spokes/b"]);
    assert_eq!(keys(&state, "").len(), 5);
    assert_eq!(state.range(&"nothing".into()), Range { entries: vec![], revision: 1 });
}

#[test]
fn an_expired_lease_deletes_its_keys() {
    let now = Instant::now();
    let mut state = State::default();
    let (kept, left) = (state.grant(TTL, now).unwrap(), state.grant(TTL, now).unwrap());
    done(&mut state, vec![put_under("a", "", Some(kept)), put_under("b", "", Some(left)), put("c", "")]);

    let later = now + TTL - Duration::from_nanos(1);
    assert_eq!(state.keep_alive(kept, later), Ok(vec!["a".to_owned()]));
    assert_eq!(state.expire(later), []);
    assert_eq!(state.expire(now + TTL), [left]);
    assert_eq!(keys(&state, ""), ["a", "c"]);
    assert_eq!(state.keep_alive(left, later), Err(StoreError::NoSuchLease(left)));
    let too_late = state.txn(always(vec![put("d", ""), put_under("b", "", Some(left))]));
    assert_eq!(too_late, Err(StoreError::NoSuchLease(left)));
    assert_eq!(keys(&state, ""), ["a", "c"], "a rejected transaction has no effect");
    assert_eq!(state.expire(later + TTL), [kept]);
    assert_eq!(keys(&state, ""), ["c"]);
}

#[test]
fn a_key_belongs_to_the_lease_of_its_last_put() {
    let now = Instant::now();
    let mut state = State::default();
    let (old, new) = (state.grant(TTL, now).unwrap(), state.grant(TTL, now).unwrap());
    done(&mut state, vec![put_under("a", "", Some(old)), put_under("b", "", Some(old))]);
    done(&mut state, vec![put_under("a", "", Some(new)), put("b", "")]);
    assert_eq!(state.keep_alive(old, now), Ok(vec![]));
    state.revoke(old).unwrap();
    assert_eq!(keys(&state, ""), ["a", "b"]);
    done(&mut state, vec![delete("a")]);
    assert_eq!(state.keep_alive(new, now), Ok(vec![]));
    state.revoke(new).unwrap();
    assert_eq!(state.revision, 3, "a lease without keys deletes nothing");
    assert_eq!(state.revoke(new), Err(StoreError::NoSuchLease(new)));
}

#[test]
fn a_restored_state_is_equal_and_leases_have_their_whole_time() {
    let now = Instant::now();
    let mut state = State::default();
    let lease = state.grant(TTL, now).unwrap();
    done(&mut state, vec![put_under("a", "1", Some(lease)), put("b", "2")]);
    let mut after = State::restored(1, 1, state.range(&"".into()).entries, vec![(lease, TTL)], now + TTL);
    assert_eq!(after.range(&"".into()), state.range(&"".into()));
    assert_eq!(after.expire(now + TTL), []);
    assert_eq!(after.expire(now + 2 * TTL), [lease]);
    assert_eq!(keys(&after, ""), ["b"]);
    assert_eq!(after.grant(TTL, now), Ok(Lease(2)), "ids are not reused");
}

#[test]
fn limits_are_exact() {
    let mut state = State::default();
    let ops = |len: usize| always((0..len).map(|n| put(&format!("{n}"), "")).collect());
    assert!(state.txn(ops(TXN_OPS_MAX)).is_ok());
    assert_eq!(state.txn(ops(TXN_OPS_MAX + 1)), Err(StoreError::TooManyOps(TXN_OPS_MAX + 1)));

    let value = |bytes| always(vec![Op::Put { key: "v".to_owned(), value: vec![0; bytes], lease: None }]);
    let fits = TXN_BYTES_MAX - "v".len();
    assert!(state.txn(value(fits)).is_ok());
    assert_eq!(state.txn(value(fits + 1)), Err(StoreError::TooLarge(TXN_BYTES_MAX + 1)));

    let twice = always(vec![put("a", "1"), delete("a")]);
    assert_eq!(state.txn(twice), Err(StoreError::DuplicateKey("a".to_owned())));

    let now = Instant::now();
    for _ in 0..LEASES_MAX {
        state.grant(TTL, now).unwrap();
    }
    assert_eq!(state.grant(TTL, now), Err(StoreError::TooManyLeases));
    state.revoke(Lease(1)).unwrap();
    assert!(state.grant(TTL, now).is_ok());
}

#[derive(Clone, Debug)]
enum Step {
    Put(u8, bool),
    Delete(u8),
    Grant,
    KeepAlive,
    Revoke,
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..4u8, any::<bool>()).prop_map(|(key, leased)| Step::Put(key, leased)),
        (0..4u8).prop_map(Step::Delete),
        Just(Step::Grant),
        Just(Step::KeepAlive),
        Just(Step::Revoke),
        (0..4000u64).prop_map(Step::Pass),
    ]
}

proptest! {
    /// The events together yield the state, and each lease has exactly the keys that name it. Watches and restored
    /// stores depend on that.
    #[test]
    fn events_are_complete_and_leases_have_exactly_their_keys(
        steps in proptest::collection::vec(step(), 0..60)
    ) {
        let mut state = State::default();
        let mut now = Instant::now();
        let mut replayed: BTreeMap<String, KeyValue> = BTreeMap::new();
        let mut newest = None;
        for step in steps {
            let before = state.revision;
            match step {
                Step::Put(key, leased) => {
                    drop(state.txn(always(vec![put_under(&format!("k{key}"), "", newest.filter(|_| leased))])));
                }
                Step::Delete(key) => drop(state.txn(always(vec![delete(&format!("k{key}"))]))),
                Step::Grant => newest = Some(state.grant(TTL, now).unwrap()),
                Step::KeepAlive => drop(newest.map(|lease| state.keep_alive(lease, now))),
                Step::Revoke => drop(newest.map(|lease| state.revoke(lease))),
                Step::Pass(ms) => {
                    now += Duration::from_millis(ms);
                    state.expire(now);
                }
            }
            let changes = state.take_changes();
            prop_assert_eq!(state.revision, before + changes.events.len() as u64);
            for (ahead, events) in changes.events.into_iter().enumerate() {
                for event in events {
                    prop_assert_eq!(event.revision(), before + 1 + ahead as u64);
                    match event {
                        Event::Put(entry) => drop(replayed.insert(entry.key.clone(), entry)),
                        Event::Delete { key, .. } => prop_assert!(replayed.remove(&key).is_some()),
                    }
                }
            }
            prop_assert_eq!(&replayed, &state.entries);
            for (lease, granted) in &state.leases {
                let theirs = state.entries.values().filter(|entry| entry.lease == Some(*lease));
                let theirs: BTreeSet<_> = theirs.map(|entry| entry.key.clone()).collect();
                prop_assert_eq!(&granted.keys, &theirs);
            }
            let orphan = |entry: &&KeyValue| entry.lease.is_some_and(|lease| !state.leases.contains_key(&lease));
            prop_assert_eq!(state.entries.values().find(orphan), None);
        }
    }
}
