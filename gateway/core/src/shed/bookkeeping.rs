//! Tests of the pools' accounting: every admitted request is released, whatever its cost and duration, and then the
//! pools are empty.

use super::*;
use crate::some_instant;
use proptest::prelude::*;

const MS: Duration = Duration::from_millis(1);

#[derive(Clone, Copy, Debug)]
enum Event {
    Enter {
        region: usize,
        deployment: usize,
        tenant: usize,
        priority: Priority,
        tokens: u64,
    },
    Leave(usize),
    /// Report of the region, which serves these deployments; idle entries are dropped with it.
    Report {
        region: usize,
        served: [bool; 2],
        wait_ms: u32,
    },
}

fn event() -> impl Strategy<Value = Event> {
    let priority = prop_oneof![Just(Priority::Interactive), Just(Priority::Bulk)];
    // Half of the requests cost nothing, and some overflow the sum.
    let tokens = prop_oneof![4 => Just(0u64), 3 => 1u64..2_000, 1 => Just(u64::MAX)];
    prop_oneof![
        4 => (0usize..2, 0usize..2, 0usize..3, priority, tokens).prop_map(|(region, deployment, tenant, priority, tokens)| {
            Event::Enter { region, deployment, tenant, priority, tokens }
        }),
        3 => (0usize..64).prop_map(Event::Leave),
        3 => (0usize..2, any::<[bool; 2]>(), 0u32..5_000)
            .prop_map(|(region, served, wait_ms)| Event::Report { region, served, wait_ms }),
    ]
}

fn region(index: usize) -> RegionIndex {
    RegionIndex::new(index).expect("a small number")
}

fn names() -> [DeploymentName; 2] {
    ["a", "b"].map(|name| name.parse().expect("a name"))
}

proptest! {
    #[test]
    fn every_admitted_request_is_released_whatever_its_cost_and_duration(
        // Pauses are longer than the time after which an idle tenant is dropped.
        events in prop::collection::vec((event(), 0u32..3_000), 1..200),
    ) {
        let (mut now, mut pools, mut in_flight) = (some_instant(), AdmissionPoolSet::default(), Vec::new());
        let requests = |pools: &AdmissionPoolSet| -> u64 {
            pools.regions.values().flat_map(BTreeMap::values).map(AdmissionPool::requests).sum()
        };
        for (event, pause_ms) in events {
            now += pause_ms * MS;
            match event {
                Event::Enter { region: at, deployment, tenant, priority, tokens } => {
                    let request = AdmissionRequest { tenant, weight: 1, priority, tokens, left: Duration::from_secs(600) };
                    in_flight.extend(pools.enter(region(at), &names()[deployment], &request, now).ok());
                }
                Event::Leave(which) if !in_flight.is_empty() => {
                    let which = which % in_flight.len();
                    pools.leave(in_flight.swap_remove(which));
                }
                Event::Leave(_) => {}
                Event::Report { region: at, served, wait_ms } => {
                    let waits = QueueWaits { interactive: Some(wait_ms * MS), bulk: Some(wait_ms * MS) };
                    let (names, waits) = (names(), |served: bool| served.then_some(waits));
                    pools.report(region(at), names.iter().zip(served.map(waits)), now);
                }
            }
            prop_assert_eq!(requests(&pools), in_flight.len() as u64);
        }
        in_flight.into_iter().for_each(|entered| pools.leave(entered));
        for at in 0..2 {
            now += Duration::from_secs(2);
            pools.report(region(at), names().iter().map(|name| (name, None)), now);
        }
        prop_assert!(pools.regions.values().all(BTreeMap::is_empty), "idle pools are dropped: {pools:?}");
    }
}

#[test]
fn a_request_without_cost_is_released_after_its_tenant_became_idle() {
    let (mut now, mut pools) = (some_instant(), AdmissionPoolSet::default());
    let request = AdmissionRequest {
        tenant: 7,
        weight: 1,
        priority: Priority::Interactive,
        tokens: 0,
        left: Duration::from_secs(30),
    };
    let [name, _] = names();
    let entered = pools.enter(region(0), &name, &request, now).expect("an empty pool admits it");
    now += Duration::from_millis(1_500);
    pools.report(region(0), [(&name, Some(QueueWaits::default()))], now);
    pools.report(region(0), [(&name, None)], now);
    pools.leave(entered);
    assert!(pools.regions[&region(0)][&name].is_empty());
}
