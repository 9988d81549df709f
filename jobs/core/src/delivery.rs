//! Selection of the results to send: a slow or hostile target must not delay the deliveries of other tenants.
//!
//! A process sends a limited number of results at the same time, and a target can keep each of them until its timeout. So a
//! tenant can have as many deliveries in flight as there are free slots left ([`select`]). This is the dynamic threshold of
//! Choudhury and Hahne for buffers that several queues share (IEEE/ACM Transactions on Networking 6(2), 1998), with factor 1:
//! one tenant alone uses half of the slots, two a third each, and a further tenant always finds one free, without a number
//! that depends on how many tenants there are. Free slots are granted to the tenant with the fewest deliveries in flight.
//!
//! A host has a limit as well, so that the many results of a tenant do not overload it, and so that the other targets of the
//! tenant have slots. Each tenant can have one delivery in flight at a host regardless of this limit: otherwise one tenant
//! could block a host that another one uses.

use crate::job::{DurableJobId, UnixMillis};
use crate::queue::DurableJobQueue;
use std::collections::{BTreeMap, BTreeSet};

/// Due results of a tenant that one selection reads. It bounds the time of a selection while hosts are at their limit; the
/// results after them wait, which concerns this tenant only.
const SCAN_MAX: usize = 256;

/// Limits on the deliveries that a process has in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveryLimits {
    /// Deliveries in flight.
    pub total: usize,
    /// Deliveries in flight at one host, beside the first one of each tenant.
    pub per_host: usize,
}

/// Deliveries that a process has in flight, by tenant and by host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeliveriesInFlight {
    total: usize,
    tenants: BTreeMap<String, usize>,
    /// Number of each tenant at each host.
    hosts: BTreeMap<String, BTreeMap<String, usize>>,
}

impl DeliveriesInFlight {
    /// Counts a delivery that begins.
    pub fn begin(&mut self, tenant: &str, url: &str) {
        self.total += 1;
        *self.tenants.entry(tenant.to_owned()).or_default() += 1;
        let tenants = self.hosts.entry(host(url).to_owned()).or_default();
        *tenants.entry(tenant.to_owned()).or_default() += 1;
    }

    /// Removes a delivery that has begun.
    pub fn end(&mut self, tenant: &str, url: &str) {
        self.total = self.total.saturating_sub(1);
        decrement(&mut self.tenants, tenant);
        if let Some(tenants) = self.hosts.get_mut(host(url)) {
            decrement(tenants, tenant);
            if tenants.is_empty() {
                self.hosts.remove(host(url));
            }
        }
    }

    fn of_tenant(&self, tenant: &str) -> usize {
        self.tenants.get(tenant).copied().unwrap_or(0)
    }

    /// Whether a host accepts a further delivery of a tenant.
    fn has_slot_at(&self, url: &str, tenant: &str, limits: DeliveryLimits) -> bool {
        let Some(tenants) = self.hosts.get(host(url)) else { return true };
        !tenants.contains_key(tenant) || tenants.values().sum::<usize>() < limits.per_host
    }
}

fn decrement(counts: &mut BTreeMap<String, usize>, key: &str) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

/// Returns the host and the port of a URL, as it was stored at the submission.
fn host(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split(['/', '?', '#']).next().unwrap_or(rest)
}

/// Selects the results to send now: those of the tenants with the fewest deliveries in flight, earliest first.
pub fn select(
    queue: &DurableJobQueue,
    in_flight: &DeliveriesInFlight,
    limits: DeliveryLimits,
    now: UnixMillis,
) -> Vec<DurableJobId> {
    let mut in_flight = in_flight.clone();
    let mut waiting: BTreeMap<&str, _> =
        queue.deliverable(now).map(|(tenant, due)| (tenant, due.take(SCAN_MAX).peekable())).collect();
    // Tenants with a due result: deliveries in flight, time of the next result, name.
    let mut tenants = BTreeSet::new();
    for (tenant, due) in &mut waiting {
        tenants.extend(due.peek().map(|(time, _)| (in_flight.of_tenant(tenant), *time, *tenant)));
    }
    let mut selected = Vec::new();
    while let Some((count, _, tenant)) = tenants.pop_first()
        && count < limits.total.saturating_sub(in_flight.total)
        && let Some(due) = waiting.get_mut(tenant)
    {
        let url = |id| queue.job(id).and_then(|job| job.spec.webhook.as_deref()).unwrap_or_default();
        let Some((_, id)) = due.find(|(_, id)| in_flight.has_slot_at(url(*id), tenant, limits)) else {
            continue;
        };
        in_flight.begin(tenant, url(id));
        selected.push(id);
        tenants.extend(due.peek().map(|(time, _)| (count + 1, *time, tenant)));
    }
    selected
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{
        DeliveryProgress, DurableJob, JobDelivery, JobOperation, JobOutcome, JobSpec, JobStatus, StoredRange,
    };
    use regions::Priority;

    const LIMITS: DeliveryLimits = DeliveryLimits { total: 64, per_host: 16 };
    const NOW: UnixMillis = UnixMillis(1000);

    /// Queue with due results: tenant, URL and number of them.
    fn queue(due: &[(&str, &str, u64)]) -> DurableJobQueue {
        let job = |tenant: &str, url: &str| DurableJob {
            spec: JobSpec {
                tenant: tenant.to_owned(),
                deployment: "minilm".to_owned(),
                operation: JobOperation::Embeddings,
                priority: Priority::Bulk,
                inputs: 1,
                payload: StoredRange { object: 1, offset: 0, length: 1 },
                deadline: None,
                start_by: None,
                idempotency: None,
                webhook: Some(url.to_owned()),
                chunk: None,
                residency: None,
                trace: None,
            },
            sequence: 1,
            attempts: 1,
            last_error: None,
            status: JobStatus::Finished {
                outcome: JobOutcome::Succeeded,
                result: None,
                at: UnixMillis(1),
                delivery: JobDelivery::Pending {
                    progress: DeliveryProgress::begun(UnixMillis(1)),
                    not_before: UnixMillis(1),
                },
            },
        };
        let jobs = due.iter().flat_map(|(tenant, url, count)| (0..*count).map(|_| job(tenant, url)));
        let jobs = (1..).zip(jobs).map(|(number, job)| (DurableJobId::new(UnixMillis(1), number), job));
        DurableJobQueue::restore(jobs, 1)
    }

    /// Number of selected results by tenant and host, and the deliveries in flight with them.
    fn counts(
        queue: &DurableJobQueue,
        mut in_flight: DeliveriesInFlight,
    ) -> (BTreeMap<(String, String), usize>, DeliveriesInFlight) {
        let mut counts = BTreeMap::new();
        for id in select(queue, &in_flight, LIMITS, NOW) {
            let spec = &queue.job(id).unwrap().spec;
            let url = spec.webhook.as_deref().unwrap();
            in_flight.begin(&spec.tenant, url);
            *counts.entry((spec.tenant.clone(), host(url).to_owned())).or_default() += 1;
        }
        (counts, in_flight)
    }

    fn of<'a>(expected: &[(&'a str, &'a str, usize)]) -> BTreeMap<(String, String), usize> {
        expected.iter().map(|(tenant, host, n)| (((*tenant).to_owned(), (*host).to_owned()), *n)).collect()
    }

    #[test]
    fn one_tenant_leaves_half_of_the_slots_and_a_host_has_a_limit() {
        let many: Vec<_> =
            (0..8).map(|n| ("a", ["https://h1/x", "https://h2:8443/x", "https://h3/x"][n % 3], 50)).collect();
        let (found, in_flight) = counts(&queue(&many), DeliveriesInFlight::default());
        assert_eq!(found.values().sum::<usize>(), 32, "{found:?}");
        assert!(found.values().all(|count| *count <= LIMITS.per_host), "{found:?}");
        // Nothing more for this tenant, and all the rest for others.
        assert_eq!(counts(&queue(&many), in_flight.clone()).0, of(&[]));
        let (found, _) = counts(&queue(&[("b", "https://h9/", 5)]), in_flight);
        assert_eq!(found, of(&[("b", "h9", 5)]));
        let (found, _) = counts(&queue(&[("a", "https://h1/", 50)]), DeliveriesInFlight::default());
        assert_eq!(found, of(&[("a", "h1", 16)]));
    }

    #[test]
    fn a_tenant_is_served_although_another_one_fills_its_host() {
        let (_, in_flight) = counts(&queue(&[("a", "https://h/", 200)]), DeliveriesInFlight::default());
        let (found, in_flight) =
            counts(&queue(&[("a", "https://h/", 200), ("b", "https://h/", 200)]), in_flight);
        assert_eq!(found, of(&[("b", "h", 1)]), "one slot beside the limit of the host");
        // When the first deliveries end, the tenant with fewer is next.
        let mut after = in_flight;
        (0..4).for_each(|_| after.end("a", "https://h/"));
        let (found, _) = counts(&queue(&[("a", "https://h/", 200), ("b", "https://h/", 200)]), after);
        assert_eq!(found, of(&[("b", "h", 3)]));
    }

    #[test]
    fn tenants_share_equally_and_a_new_one_always_finds_a_slot() {
        let names: Vec<String> = (0..30).map(|n| format!("t{n:02}")).collect();
        let urls: Vec<String> = (0..30).map(|n| format!("https://h{n}/")).collect();
        let mut in_flight = DeliveriesInFlight::default();
        for n in 1..=names.len() {
            let due: Vec<_> = (0..n).map(|n| (names[n].as_str(), urls[n].as_str(), 100)).collect();
            let (found, now) = counts(&queue(&due), in_flight);
            if n <= 5 {
                assert!(found.contains_key(&(names[n - 1].clone(), format!("h{}", n - 1))), "{n}: {found:?}");
            }
            in_flight = now;
            assert!(in_flight.total <= LIMITS.total);
        }
        let due: Vec<_> = (0..30).map(|n| (names[n].as_str(), urls[n].as_str(), 100)).collect();
        let (found, _) = counts(&queue(&due), DeliveriesInFlight::default());
        let (least, most) = (found.values().min().unwrap(), found.values().max().unwrap());
        assert!(found.len() == 30 && most - least <= 1, "{found:?}");
    }

    #[test]
    fn results_that_are_due_later_wait_and_the_earliest_is_first() {
        let queue = queue(&[("a", "https://h/", 3)]);
        assert!(select(&queue, &DeliveriesInFlight::default(), LIMITS, UnixMillis(0)).is_empty());
        let selected = select(&queue, &DeliveriesInFlight::default(), LIMITS, NOW);
        assert!(selected.len() == 3 && selected.is_sorted(), "{selected:?}");
    }

    #[test]
    fn the_host_of_a_url_has_its_port() {
        for (url, expected) in [
            ("https://a.example/x?y", "a.example"),
            ("http://127.0.0.1:80/", "127.0.0.1:80"),
            ("https://[::1]:8/x", "[::1]:8"),
            ("https://a.example?x", "a.example"),
        ] {
            assert_eq!(host(url), expected);
        }
    }

    #[test]
    fn ends_remove_what_begins_have_counted() {
        let mut in_flight = DeliveriesInFlight::default();
        in_flight.begin("a", "https://h/");
        in_flight.begin("a", "https://h/x");
        in_flight.end("a", "https://h/");
        assert_ne!(in_flight, DeliveriesInFlight::default());
        in_flight.end("a", "https://h/y");
        assert_eq!(in_flight, DeliveriesInFlight::default());
    }
}
