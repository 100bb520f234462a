FROM python:3.11-slim
WORKDIR /lab
COPY . .
RUN pip install --no-cache-dir -e ".[dev]" -c constraints.txt
ENV OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 MPLBACKEND=Agg
CMD ["python", "hopplus_mcts.py", "--seed", "3"]
