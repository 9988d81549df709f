//! What the plan says of requests like this one: the rows of this gateway, found without a search and without an allocation.
//!
//! A row is of a deployment, an origin and a policy. A request looks for the row of its own policy, and where it asks for less
//! than any row says (its header narrows its residency in a way that nobody has asked for before), the row of the least
//! policy that contains its own will do: whoever draws leaves out the regions that may not see it, as everywhere.
//!
//! A row divides tokens, and does not say whose. Which requests go far is decided here: its shares stand in order of their
//! distance from the origin, and lookups are thrown into the nearer part of the whole, as large as theirs is of what is
//! asked, and bulk into the rest ([`throw`]). Together they are divided as the row says; so a backfill that fills the nearest
//! region travels itself, and those who wait for an answer do not travel for it.
//!
//! See [`regions::weights`] for what is drawn and for what stands above it.

use crate::circuit::Permille;
use crate::priority::Priority;
use regions::catalogue::Catalogue;
use regions::id::DeploymentName;
use regions::residency::ResidencyPolicy;
use regions::route::Generation;
use regions::set::{RegionIndex, RegionSet};
use regions::weights::Share;
use std::collections::BTreeMap;

/// A gateway's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights {
    /// How new they are.
    pub generation: Generation,
    rows: BTreeMap<DeploymentName, Vec<Row>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    origin: RegionIndex,
    permitted: RegionSet,
    shares: Box<[Share]>,
}

/// A row as it is told: for what, under which policy, from where, and how it is divided.
pub type Told = (DeploymentName, ResidencyPolicy, RegionIndex, Box<[Share]>);

impl Weights {
    /// These rows, with their policies worked out.
    pub fn new(
        generation: Generation,
        told: impl IntoIterator<Item = Told>,
        catalogue: &Catalogue,
    ) -> Weights {
        let mut rows: BTreeMap<DeploymentName, Vec<Row>> = BTreeMap::new();
        for (deployment, residency, origin, mut shares) in told {
            let from = catalogue.region(origin).point;
            let away = |share: &Share| catalogue.region(share.region).point.distance_km(from);
            shares.sort_by(|a, b| away(a).total_cmp(&away(b)));
            let row = Row { origin, permitted: residency.permitted(catalogue), shares };
            rows.entry(deployment).or_default().push(row);
        }
        // The narrowest first, so that the first that contains a policy is the least that does.
        rows.values_mut().for_each(|rows| rows.sort_by_key(|row| row.permitted.len()));
        Weights { generation, rows }
    }

    /// How requests for `deployment` from `origin` that may go to `allowed` are divided, the nearest first; not at all, where
    /// the plan does not say.
    pub fn of(&self, deployment: &DeploymentName, origin: RegionIndex, allowed: &RegionSet) -> &[Share] {
        let rows = self.rows.get(deployment).map_or(&[][..], Vec::as_slice);
        let found = rows.iter().find(|row| row.origin == origin && allowed.is_subset(&row.permitted));
        found.map_or(&[], |row| &row.shares)
    }

    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.rows.values().map(Vec::len).sum()
    }
}

/// Where a request of this priority is thrown among the shares of its row, if `lookups` is the part that interactive requests
/// have of what is asked. `chance` is a number from 0 to 999, each equally likely. Without that part all are thrown alike.
pub fn throw(priority: Priority, lookups: Option<Permille>, chance: Permille) -> u16 {
    let whole = u32::from(Permille::ALL.get());
    let (from, to) = match (lookups.map(|part| u32::from(part.get())), priority) {
        (None, _) => (0, whole),
        (Some(part), Priority::Interactive) => (0, part),
        (Some(part), Priority::Bulk) => (part, whole),
    };
    let thrown = from + u32::from(chance.get().min(999)) * (to - from) / whole;
    u16::try_from(thrown.min(whole - 1)).expect("less than a thousand")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use regions::weights::{Why, draw};

    #[test]
    fn a_request_finds_the_row_of_the_least_policy_that_contains_its_own() {
        let catalogue = Catalogue::builtin();
        let at = |id: &str| catalogue.index_of(&id.parse().unwrap()).unwrap();
        let (america, europe, tokyo) = (at("aws/us-east-1"), at("gcp/europe-west4"), at("oci/ap-tokyo-1"));
        let name = |text: &str| text.parse::<DeploymentName>().unwrap();
        let policy = |text: &str| text.parse::<ResidencyPolicy>().unwrap();
        let to = |region| [Share { region, permille: 1000, why: Why::Nearest }];
        let row = |deployment: &str, residency: &str, origin, region| -> Told {
            (name(deployment), policy(residency), origin, Box::new(to(region)))
        };
        let told = [
            row("d", "anywhere", america, america),
            row("d", "eu", america, europe),
            row("d", "anywhere", tokyo, tokyo),
        ];
        let weights = Weights::new(Generation { epoch: 1, number: 7 }, told, &catalogue);
        let find = |deployment: &str, origin, residency: &str| {
            weights.of(&name(deployment), origin, &policy(residency).permitted(&catalogue)).to_vec()
        };
        assert_eq!(find("d", america, "anywhere"), to(america));
        assert_eq!(find("d", america, "eu"), to(europe));
        assert_eq!(find("d", america, "de,fr"), to(europe), "a policy of its own within the narrower");
        assert_eq!(find("d", america, "us"), to(america));
        assert_eq!(find("d", tokyo, "eu"), to(tokyo));
        assert_eq!(find("d", europe, "eu"), []);
        assert_eq!(find("e", america, "eu"), []);
        assert_eq!(weights.rows(), 3);
    }

    #[test]
    fn shares_stand_in_order_of_their_distance_from_the_origin() {
        let catalogue = Catalogue::builtin();
        let at = |id: &str| catalogue.index_of(&id.parse().unwrap()).unwrap();
        let regions = ["oci/ap-tokyo-1", "aws/us-east-1", "gcp/europe-west4", "aws/eu-central-1"].map(at);
        let shares = regions.map(|region| Share { region, permille: 250, why: Why::NearerFull });
        let told: [Told; 2] = [at("aws/eu-central-1"), at("oci/ap-tokyo-1")].map(|origin| {
            ("d".parse().unwrap(), ResidencyPolicy::Anywhere, origin, Box::new(shares) as Box<[Share]>)
        });
        let weights = Weights::new(Generation { epoch: 1, number: 1 }, told, &catalogue);
        let order = |origin: &str| -> Vec<String> {
            let shares = weights.of(&"d".parse().unwrap(), at(origin), &catalogue.all());
            shares.iter().map(|share| catalogue.region(share.region).id.to_string()).collect()
        };
        let europe = ["aws/eu-central-1", "gcp/europe-west4", "aws/us-east-1", "oci/ap-tokyo-1"];
        assert_eq!(order("aws/eu-central-1"), europe);
        let asia = ["oci/ap-tokyo-1", "gcp/europe-west4", "aws/eu-central-1", "aws/us-east-1"];
        assert_eq!(order("oci/ap-tokyo-1"), asia);
    }

    /// How often each region of a row is drawn by requests of a priority, of a thousand.
    fn drawn(shares: &[Share], priority: Priority, lookups: Option<Permille>) -> BTreeMap<usize, u32> {
        let mut counts = BTreeMap::new();
        for chance in 0..1000 {
            let thrown = throw(priority, lookups, Permille::new(chance));
            let region = draw(shares, |_| true, thrown).unwrap();
            *counts.entry(region.as_usize()).or_default() += 1;
        }
        counts
    }

    fn row(permilles: &[u16]) -> Vec<Share> {
        let share = |(region, permille): (usize, &u16)| Share {
            region: RegionIndex::new(region).unwrap(),
            permille: *permille,
            why: Why::NearerFull,
        };
        permilles.iter().enumerate().map(share).collect()
    }

    #[test]
    fn a_backfill_travels_and_lookups_stay() {
        let (half_away, part) = (row(&[500, 500]), Some(Permille::new(100)));
        assert_eq!(drawn(&half_away, Priority::Interactive, part), [(0, 1000)].into());
        assert_eq!(drawn(&half_away, Priority::Bulk, part)[&1], 555, "half of all, by nine tenths of all");
        // More lookups than the nearest region takes travel as well, and no bulk stays.
        let (little, many) = (row(&[300, 700]), Some(Permille::new(600)));
        assert_eq!(drawn(&little, Priority::Interactive, many), [(0, 500), (1, 500)].into());
        assert_eq!(drawn(&little, Priority::Bulk, many), [(1, 1000)].into());
        // Where nobody has counted yet, and where there are no others.
        for priority in [Priority::Interactive, Priority::Bulk] {
            assert_eq!(drawn(&half_away, priority, None), [(0, 500), (1, 500)].into());
        }
        assert_eq!(
            drawn(&half_away, Priority::Interactive, Some(Permille::ALL)),
            [(0, 500), (1, 500)].into()
        );
        assert_eq!(drawn(&half_away, Priority::Bulk, Some(Permille::new(0))), [(0, 500), (1, 500)].into());
    }

    proptest! {
        /// The plan stays the plan: whatever the priorities' parts are, each region has what its row says of all tokens.
        #[test]
        fn priorities_together_are_divided_as_the_row_says(
            cuts in prop::collection::btree_set(1..1000u16, 0..5),
            lookups in 0..=1000u16,
        ) {
            let mut permilles = Vec::new();
            let mut last = 0;
            for cut in cuts.into_iter().chain([1000]) {
                permilles.push(cut - last);
                last = cut;
            }
            let shares = row(&permilles);
            let part = Some(Permille::new(lookups));
            let of = |priority| drawn(&shares, priority, part);
            let (interactive, bulk) = (of(Priority::Interactive), of(Priority::Bulk));
            for (region, permille) in permilles.iter().enumerate() {
                let times = |counts: &BTreeMap<usize, u32>| counts.get(&region).copied().unwrap_or(0);
                let (near, far) = (u32::from(lookups), 1000 - u32::from(lookups));
                let got = (times(&interactive) * near + times(&bulk) * far) / 1000;
                prop_assert!(got.abs_diff(u32::from(*permille)) <= 2, "{region}: {got} of {permille}");
            }
        }
    }
}
