//! Maximum length of a requested residency: an accepted one is also reported to the hub, and parsed there.

use super::fixture::{Edge, Hub, NEAR, table};
use super::two_regions;
use regions::Catalogue;
use regions::residency::{MAX_POLICY_LEN, ResidencyPolicy};

/// Growth of the canonical form of a policy when the deployment's own condition `us` is added: `us & `.
const JOINED_BYTES: usize = 5;

/// Returns the conditions of a policy that fits into [`MAX_POLICY_LEN`] in canonical form, but not with
/// [`JOINED_BYTES`] more. Each of them allows the near region.
fn conditions() -> Vec<String> {
    let catalogue = Catalogue::builtin();
    let ids: Vec<_> = catalogue.iter().map(|(_, region)| region.id.to_string()).collect();
    let pairs = ids.iter().enumerate().flat_map(|(at, a)| ids[at + 1..].iter().map(move |b| (a, b)));
    let all: Vec<_> = pairs.map(|(a, b)| format!("us,{a},{b}")).collect();
    let length = |conditions: &[String]| {
        conditions.iter().map(String::len).sum::<usize>() + canonical_extra(conditions)
    };
    let fits = |conditions: &&[String]| {
        (MAX_POLICY_LEN - JOINED_BYTES + 1..=MAX_POLICY_LEN).contains(&length(conditions))
    };
    let runs = (0..all.len()).flat_map(|from| (from + 1..=all.len()).map(move |to| (from, to)));
    let found = runs.map(|(from, to)| &all[from..to]).find(fits);
    found.expect("the names of regions differ in length").to_vec()
}

/// Counts the extra bytes of the canonical form, which separates conditions by ` & `.
fn canonical_extra(conditions: &[String]) -> usize {
    3 * (conditions.len() - 1)
}

#[tokio::test]
async fn a_residency_is_limited_by_its_canonical_form_and_demand_is_still_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, at) = Hub::start(table(1, two_regions().await, &[])).await;
    let edge = Edge::start(dir.path(), at).await;
    edge.wait_until("the near region is healthy", |routes| {
        let rows = routes["regions"].as_array().into_iter().flatten();
        rows.filter(|region| region["health"] == "healthy").count() == 2
    })
    .await;
    let serving_region_for = async |model: &str, residency: &str| {
        edge.serving_region(model, &[("x-meridian-residency", residency)]).await
    };
    let mut conditions = conditions();
    let fits = conditions.join("&");
    assert_eq!(serving_region_for("m", &fits).await, NEAR);
    assert_eq!(
        serving_region_for("m-us", &fits).await,
        "invalid_header",
        "the deployment's residency is part of the policy"
    );
    let one_more = format!("{fits}&us,eu");
    assert!(one_more.len() <= MAX_POLICY_LEN, "the original value would fit: {} bytes", one_more.len());
    assert_eq!(serving_region_for("m", &one_more).await, "invalid_header");
    conditions.pop();
    assert_eq!(serving_region_for("m-us", &conditions.join("&")).await, NEAR);

    hub.wait_until_reported().await;
    let reported = hub.demand.lock().unwrap().clone().unwrap();
    let canonical = fits.parse::<ResidencyPolicy>().unwrap().to_string();
    let of_m: Vec<_> = reported.classes.iter().filter(|class| class.deployment == "m").collect();
    assert_eq!(of_m.len(), 1, "one class for each set of regions: {of_m:?}");
    assert_eq!(of_m[0].residency.as_deref(), Some(&*canonical));
    assert_eq!(edge.serving_region("m", &[]).await, NEAR);
}
