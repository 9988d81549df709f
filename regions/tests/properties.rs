//! Properties of residency policies: reading, writing, and narrowing, over policies of the real catalogue.

use std::sync::LazyLock;

use proptest::prelude::*;
use regions::residency::MAX_POLICY_LEN;
use regions::{Area, Catalogue, Jurisdiction, RegionId, ResidencyPolicy};

static CATALOGUE: LazyLock<Catalogue> = LazyLock::new(Catalogue::builtin);

fn any_area() -> impl Strategy<Value = Area> {
    let jurisdictions: Vec<Jurisdiction> = CATALOGUE.jurisdictions().cloned().collect();
    let regions: Vec<RegionId> = CATALOGUE.iter().map(|(_, region)| region.id.clone()).collect();
    prop_oneof![
        prop::sample::select(jurisdictions).prop_map(Area::Jurisdiction),
        prop::sample::select(regions).prop_map(Area::Region),
    ]
}

fn any_condition() -> impl Strategy<Value = ResidencyPolicy> {
    prop::collection::vec(any_area(), 1..5)
        .prop_map(|areas| ResidencyPolicy::any_of(areas).expect("not empty"))
}

fn any_policy() -> impl Strategy<Value = ResidencyPolicy> {
    prop_oneof![
        1 => Just(ResidencyPolicy::Anywhere),
        4 => any_condition(),
        2 => (any_condition(), any_condition()).prop_map(|(a, b)| a.narrow(&b)),
    ]
}

/// A text as a person or a program may write it, around the longest that is read.
fn any_text() -> impl Strategy<Value = String> {
    let spaced = |sign: &'static str| prop::sample::select(vec![sign.to_owned(), format!(" {sign} ")]);
    let areas = prop::collection::vec(any_area(), 1..4);
    prop::collection::vec((areas, spaced("&"), spaced(",")), 1..500).prop_map(|conditions| {
        let mut text = String::new();
        for (areas, and, or) in conditions {
            let areas: Vec<String> = areas.iter().map(Area::to_string).collect();
            text += &format!("{}{}", if text.is_empty() { "" } else { &and }, areas.join(&or));
        }
        text
    })
}

proptest! {
    #[test]
    fn a_policy_that_was_read_is_read_back_wherever_it_is_sent(one in any_text(), other in any_text()) {
        let read = |text: &str| text.parse::<ResidencyPolicy>().ok();
        for text in [&one, &other] {
            if let Some(policy) = read(text) {
                prop_assert_eq!(read(&policy.to_string()), Some(policy));
            }
        }
        if let (Some(one), Some(other)) = (read(&one), read(&other)) {
            match one.joined(&other) {
                Ok(both) => prop_assert_eq!(read(&both.to_string()), Some(both)),
                Err(_) => prop_assert!(one.narrow(&other).to_string().len() > MAX_POLICY_LEN),
            }
        }
    }

    #[test]
    fn narrowing_is_the_intersection_and_never_permits_more(a in any_policy(), b in any_policy()) {
        let (of_a, of_b) = (a.permitted(&CATALOGUE), b.permitted(&CATALOGUE));
        let of_both = a.narrow(&b).permitted(&CATALOGUE);
        prop_assert_eq!(of_both, of_a.intersect(of_b));
        prop_assert!(of_both.is_subset(&of_a) && of_both.is_subset(&of_b));
        prop_assert_eq!(a.narrow(&b), b.narrow(&a));
    }

    #[test]
    fn a_policy_means_the_same_after_it_travelled_as_text(policy in any_policy()) {
        prop_assert_eq!(policy.to_string().parse::<ResidencyPolicy>(), Ok(policy));
    }
}
