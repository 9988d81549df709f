//! `make fleet`: the fleet of the test for a person, until Ctrl-C. A process that ends is started again.

#![expect(clippy::unwrap_used, reason = "a panic removes the fleet and shows the line")]

#[path = "../../resolver/tests/dns_server/mod.rs"]
#[expect(dead_code, reason = "the tests of the resolver use all of it")]
mod dns_server;
mod files;
#[expect(dead_code, reason = "the test uses all of it")]
mod fleet;
#[path = "../haproxy/mod.rs"]
mod haproxy;
mod network;
mod process;

use fleet::Fleet;
use std::convert::Infallible;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Period of checks whether a process has ended.
const PERIOD: Duration = Duration::from_secs(1);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let [mut interrupt, mut terminate] =
        [SignalKind::interrupt(), SignalKind::terminate()].map(|kind| signal(kind).unwrap());
    // `target/PROFILE/examples/fleet`
    let program = std::env::current_exe().unwrap();
    let meridian = program.ancestors().nth(2).unwrap().join("meridian");
    println!("starting (Ctrl-C ends and removes everything)");
    tokio::select! {
        Err(reason) = serve(&meridian) => {
            eprintln!("the fleet needs network namespaces (root on Linux): {reason}");
            ExitCode::FAILURE
        }
        _ = interrupt.recv() => ExitCode::SUCCESS,
        _ = terminate.recv() => ExitCode::SUCCESS,
    }
}

/// Runs the fleet until this future is dropped.
async fn serve(meridian: &Path) -> Result<Infallible, String> {
    let mut fleet = Fleet::start(meridian).await?;
    describe(&fleet, meridian);
    loop {
        tokio::time::sleep(PERIOD).await;
        for (name, status) in fleet.ended() {
            println!("{name} ended ({status}); starting it again");
            fleet.start_again(&name).await;
            println!("{name} is ready");
        }
    }
}

/// Prints what a person needs to use the fleet.
fn describe(fleet: &Fleet, meridian: &Path) {
    println!("\n{:<36} {:<12} {:>8}  namespace", "process", "address", "id");
    for (name, id) in fleet.processes() {
        println!("{name:<36} {:<12} {id:>8}  {}", fleet.address(name), network::namespace(name));
    }
    let (client, dir, url) = (network::namespace(fleet::CLIENT), fleet.dir().display(), fleet.url());
    println!("\nready: {url}/v1 with the key {}, in the namespace {client}\n", files::KEY);
    println!(
        "  ip netns exec {client} curl -s {url}/v1/embeddings -H 'authorization: Bearer {}' \\\n    \
         -H 'content-type: application/json' -d '{{\"model\": \"minilm\", \"input\": \"a text\"}}'",
        files::KEY
    );
    println!("  ip netns exec {client} {} load --url {url} --rate 200", meridian.display());
    let hub = format!("https://{}:{}", network::host(&files::hub(1)), files::port::HUB);
    println!(
        "  ip netns exec {client} {} get regions --hub {hub} --identity {dir}/pki/operator",
        meridian.display()
    );
    println!("  kill -9 ID   # the process is started again\n\nfiles and logs: {dir}");
}
